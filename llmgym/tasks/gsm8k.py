"""GSM8K: word problems of grade-school mathematics, from files or from the Hugging Face hub.

Cobbe et al. (2021), "Training Verifiers to Solve Math Word Problems".
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmgym.tasks.problems import MathTask, Problem, in_splits, same_words, split_of

PATH_VARIABLE = "LLMGYM_GSM8K"
HUB_NAME = "openai/gsm8k"
ANNOTATION = re.compile("<<.*?>>")
TRUTH_MARK = "####"


def gsm8k(path: str | os.PathLike[str] | None = None) -> MathTask:
    """The problems of GSM8K, or others in its format.

    A prompt is the question and a line break; the solution is the worked one of the data without its
    calculator annotations (``<<48/2=24>>``), and ends with a line "#### 24"; the truth is what stands there.

    **Splits.** Validation is a tenth of the train problems, by a hash of the question; held-out are the test
    problems. A train problem whose question is in the test problems too, but for blanks and capitals, is
    left out. Of data without test problems (one file), a tenth is validation and a fifth held-out.

    Args:
        path: a JSON-lines file, each line with "question" and "answer"; or a folder with ``train.jsonl``
            and ``test.jsonl``. None: the environment variable ``LLMGYM_GSM8K`` says where; else it is
            downloaded with ``datasets`` (``pip install llmgym[llm]``).

    Raises:
        FileNotFoundError: nothing at `path`, or a folder without the two files.
        ValueError: a line that is no such JSON object, or an answer without "####", with file and line.
        ImportError, OSError: no path, and ``datasets`` is not installed or the hub not reached.
    """
    given = path if path is not None else os.environ.get(PATH_VARIABLE)
    if given is None:
        train, test = _from_hub()
    elif Path(given).is_dir():
        train, test = (_read(Path(given) / f"{name}.jsonl") for name in ("train", "test"))
    else:
        train, test = _read(Path(given)), None
    if test is None:
        return MathTask("gsm8k", *in_splits(train.items()))
    taken = {key for key in train if split_of(key) == "validation"}
    return MathTask(
        "gsm8k",
        train=[problem for key, problem in train.items() if key not in taken and key not in test],
        validation=[problem for key, problem in train.items() if key in taken and key not in test],
        held_out=list(test.values()),
    )


def _from_hub() -> tuple[dict[str, Problem], dict[str, Problem]]:
    advice = f"gsm8k: give path=, set {PATH_VARIABLE}, or"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"{advice} install datasets: pip install llmgym[llm]") from error
    try:
        data = load_dataset(HUB_NAME, "main")
    except Exception as error:  # its own kinds, requests' and huggingface_hub's
        raise OSError(f"{advice} go online: {HUB_NAME} was not loaded ({error})") from error
    return _problems(_numbered(data["train"], "train")), _problems(_numbered(data["test"], "test"))


def _read(path: Path) -> dict[str, Problem]:
    if not path.is_file():
        raise FileNotFoundError(f"path: no file {path}; allowed: a JSON-lines file, or a folder with two")
    with path.open(encoding="utf-8") as lines:
        return _problems(_parsed(lines, path))


def _parsed(lines: Iterable[str], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no JSON: {error}") from error


def _numbered(rows: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    return ((f"{HUB_NAME}, {name}, row {number}", row) for number, row in enumerate(rows))


def _problems(rows: Iterable[tuple[str, Any]]) -> dict[str, Problem]:
    """Problems by the words of their questions, the first of each."""
    problems: dict[str, Problem] = {}
    for place, row in rows:
        texts = [row.get(name) if isinstance(row, Mapping) else None for name in ("question", "answer")]
        question, answer = (text.strip() if isinstance(text, str) else "" for text in texts)
        truth = answer.rpartition(TRUTH_MARK)[2].strip() if TRUTH_MARK in answer else ""
        if not question or not truth:
            raise ValueError(
                f"{place}: got {str(row)[:80]}; allowed: an object with a question, and an answer that ends "
                f"with {TRUTH_MARK!r} and the true one"
            )
        problem = Problem(f"{question}\n", truth, ANNOTATION.sub("", answer))
        problems.setdefault(same_words(question), problem)
    return problems
