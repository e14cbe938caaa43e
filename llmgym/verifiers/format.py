"""Rewards for the form of a response: tags, where the answer stands, length.

A component is any function from a text to a number. `required_tags`, `answer_form` and `overlong` make such
functions; `score_format` applies several to a batch, weighted, and reports each. They see the response
alone: a form that only the prompt has earns nothing. None of them looks at whether the answer is right, so
that a weight near that of correctness invites well-formed nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmgym.checks import check_count, check_name
from llmgym.verifiers.extract import box_content
from llmgym.verifiers.math import extract

Component = Callable[[str], float]

ANSWER_FORMS = ("boxed", "hash", "tag")
TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
HASH = re.compile(r"(?m)^#### ?(?=[^\s#])")


@dataclass(frozen=True)
class FormatScores:
    """The forms of N responses.

    total: float64 ``[N]``, the weighted sum. components: each component's own score, unweighted, ``[N]``.
    """

    total: NDArray[np.float64]
    components: dict[str, NDArray[np.float64]]


def required_tags(*names: str) -> Component:
    """1 for a response that consists of these elements in this order and of nothing else, else 0.

    ``required_tags("think", "answer")`` wants ``<think>...</think> <answer>...</answer>``: each tag exactly
    once, something in each element, only blanks around and between them. Raises ValueError for no name or a
    name that is none.
    """
    if not names or not all(TAG_NAME.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"names: got {names!r}; allowed: different tag names such as 'think', 'answer'")
    tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]

    def score(response: str) -> float:
        if any(response.count(tag) != 1 for tag in tags):
            return 0.0
        rest = response
        for index, tag in enumerate(tags):
            before, _, rest = rest.partition(tag)
            # `partition` finds nothing where the tags are in another order; then all of it is "before".
            if bool(before.strip()) != (index % 2 == 1) or (index + 1 < len(tags) and not rest):
                return 0.0
        return 0.0 if rest.strip() else 1.0

    return score


def answer_form(form: str) -> Component:
    """1 for a response whose answer is given once and in this form, else 0.

    "boxed": one ``\\boxed{...}``, closed and not empty. "hash": one line that starts with ``####``, the last.
    "tag": one ``<answer>...</answer>``, not empty. Raises ValueError for another form.
    """
    check_name("form", form, ANSWER_FORMS)
    return {"boxed": _boxed, "hash": _hashed, "tag": _tagged}[form]


def _boxed(response: str) -> float:
    boxes = list(BOX.finditer(response))
    return float(len(boxes) == 1 and bool(box_content(response, boxes[0].end())))


def _hashed(response: str) -> float:
    lines = response.rstrip().rsplit("\n", 1)
    return float(response.count("####") == 1 and HASH.match(lines[-1]) is not None)


def _tagged(response: str) -> float:
    if response.count("<answer>") != 1 or response.count("</answer>") != 1:
        return 0.0
    return float(bool(response.partition("<answer>")[2].partition("</answer>")[0].strip()))


def states_an_answer(response: str) -> float:
    """1 for a response that states any answer, in whatever form, else 0."""
    return float(extract(response) is not None)


def overlong(max_length: int, buffer: int, length: Callable[[str], int] = len) -> Component:
    """0 up to ``max_length - buffer``, from there linearly down to -1 at `max_length` and beyond.

    The soft overlong punishment of Yu et al., "DAPO" (2025), equation 13. `length` counts a response:
    characters by default, or a tokenizer's tokens. Raises ValueError where not 1 <= buffer <= max_length.
    """
    check_count("max_length", max_length)
    if not check_count("buffer", buffer) <= max_length:
        raise ValueError(f"buffer: got {buffer}; allowed: integers from 1 to max_length = {max_length}")

    def score(response: str) -> float:
        return -min(max((length(response) - (max_length - buffer)) / buffer, 0.0), 1.0)

    return score


def score_format(
    responses: Sequence[str], components: Mapping[str, Component], weights: Mapping[str, float] | None = None
) -> FormatScores:
    """Every component of N responses, and their weighted sum (weight 1 where none is given).

    Raises ValueError for no component, for a weight without component or a weight or score that is not
    finite.
    """
    if not components:
        raise ValueError("components: got none; allowed: at least one, {name: function of a response}")
    given = dict(weights or {})
    for name, weight in given.items():
        check_name("weights", name, tuple(components))
        if not np.isfinite(weight):
            raise ValueError(f"weights: {name} has {weight!r}; allowed: a finite number")
    scores = {
        name: np.array([score(response) for response in responses], dtype=np.float64)
        for name, score in components.items()
    }
    for name, values in scores.items():
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"components: {name} gave {values[row]} for row {row}; allowed: finite numbers")
    total = np.zeros(len(responses))
    for name, values in scores.items():
        total += given.get(name, 1.0) * values
    return FormatScores(total, scores)
