"""Responses for benchmarks/grader.py: cases, labelled solutions, and answers that attack a grader."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "llmgym" / "data" / "answers.jsonl"
LABELS = "labelled_solutions.jsonl"
# Expressions against a truth that is one, so that sympy is asked; it does not come to an end with most of
# them.
HANGING = (
    (r"\boxed{(x^2+2xy+y^2+z)^{400}}", "((x+y)^2+z)^{400}"),
    (r"\boxed{(x^2+2xy+y^2+z+w)^{90}}", "((x+y)^2+z+w)^{90}"),
    (r"\boxed{x^{999^{999^{9}}}}", "x^2"),
    (r"\boxed{\sqrt{2}^{999^{999^9}}}", r"\sqrt{2}"),
)


@dataclass(frozen=True)
class Row:
    """A response, the truth, whether it is right, and how the case is named."""

    response: str
    truth: str
    right: bool
    name: str = ""
    tag: str = "fmt"
    doubtful: bool = False


def read_cases(path: Path) -> list[Row]:
    """The rows of the answer cases."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Row(r["response"], r["truth"], r["correct"], r["id"], r["tag"], r["doubtful"]) for r in rows]


def labels_path(given: Path | None) -> Path | None:
    """The labelled solutions: as given, or GSM8K_LABELS, or a data folder in the checkout or beside it."""
    if given is not None or "GSM8K_LABELS" in os.environ:
        return given or Path(os.environ["GSM8K_LABELS"])
    places = (ROOT / "data" / "gsm8k" / LABELS, ROOT.parent / "shared" / "data" / "gsm8k" / LABELS)
    return next((path for path in places if path.exists()), None)


def read_labels(path: Path) -> list[Row]:
    """Solutions of GSM8K's test problems by four models, with their authors' labels."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Row(r["solution"], r["truth"], r["is_correct"]) for r in rows]


def made_up_rows(count: int, seed: int) -> list[Row]:
    """Solutions like GSM8K's, where there are none: a few sentences, a marker, an integer."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        a, b, c = (int(x) for x in generator.integers(2, 999, 3))
        error = int(generator.integers(0, 2))
        text = (
            f"There are {a} shelves with {b} books each, so {a} * {b} = <<{a}*{b}={a * b}>>{a * b} books\n"
            f"Another {c} are on the table, so {a * b} + {c} = <<{a * b}+{c}={a * b + c}>>{a * b + c} books\n"
            f"A: {a * b + c + error}"
        )
        rows.append(Row(text, str(a * b + c), error == 0))
    return rows


def hostile_rows(cases: list[Row], count: int, hanging: int, seed: int) -> list[Row]:
    """`count` hostile answers in random order: `hanging` of them expressions that sympy does not finish, the
    others the hostile cases and variations that are longer, deeper and larger. None of them is right."""
    generator = np.random.default_rng(seed)
    attacks = [row for row in cases if row.tag != "fmt" and not row.right]
    rows = [Row(response, truth, False, "hanging") for response, truth in (HANGING * hanging)[:hanging]]
    while len(rows) < count:
        size = int(generator.integers(50, 3_000))
        made = (
            "#### " + "(" * size + "1" + ")" * size,
            r"\boxed{" * size,
            "#### " + "^".join("9" * 20),
            r"\boxed{" + r"\frac{1}{" * size + "2" + "}" * size + "}",
            "#### " + "9" * size,
            f"#### 1e{size}99999",
            "The answer is " * (size // 10) + "1, " * size,
            "#### " + "1+" * size + "1",
            "#### __import__('os').system('sleep 9')",
        )
        if generator.random() < 0.5:
            rows.append(attacks[int(generator.integers(len(attacks)))])
        else:
            rows.append(Row(made[int(generator.integers(len(made)))], "1000003", False, "made up"))
    return [rows[index] for index in generator.permutation(count)]
