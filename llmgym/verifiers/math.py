"""Whether a response states the right answer to a problem of mathematics.

`extract` finds the answer (its rules: llmgym/verifiers/extract.py), `is_correct` grades one response and
`grade` a batch. Two stages: numbers, and lists, tuples, intervals and sets of them, are compared in plain
Python as fractions; expressions (roots, pi, variables, matrices) by sympy behind math-verify's LaTeX
grammar, in worker processes that are killed when their time is up (llmgym/verifiers/pool.py). The second
stage needs the extra ``llm`` (``pip install llmgym[llm]``). Nothing is evaluated as code, nothing is
remembered between rows, no signal is set in the calling process, and any thread may call.

Conventions
-----------
tolerance      none: numbers are equal as fractions. 0.333 is not 1/3, 3.14 is not pi, 1000000.4 is not
               1000000.
percent        where only one side has a percent sign, 35% is both 35 and 0.35; 35 is not 0.35.
units          two known units must be the same ("12 cm" is not "12 m", nothing is converted: "50 cents" is
               50, not 0.5 dollars); a unit on one side alone, and any other words behind a number, are
               ignored. A single letter glued to a number is a variable. thousand, million, billion and
               trillion multiply.
separators     1,234 and 1 234 (one blank, groups of exactly three digits), LaTeX's 1{,}234 and 1\\,234, and
               1,23,456 as written in India are numbers; 3,5 and 1,23 are lists. The point is the decimal
               sign. 1_000 is no number.
worked out     a sum, difference or product of numbers is no answer where the truth is a number: else the
               question "118 + 45?" would be its own answer. Fractions (6/8 is 3/4), mixed numbers, powers,
               roots and powers of ten are. Behind "=" the last member counts: "118+45=163" is 163.
ranges         3-5 is a range, not -2.
lists          2, 3 and 3, 2 and {2,3} are the same; (2,3) is a pair or interval and is not. A choice ("3 or
               5", "1, 2, 3") is a list, wrong where one number was asked for.
plus-minus     \\pm 7 is the list 7, -7.
names          x = 5 is 5; x = 5 is not y = 5. x < 9 is (-\\infty, 9). Equations are equal up to a factor.
approximation  of "a \\approx b" a counts.
denial         "not 7" does not state 7.
boxes          \\fbox counts as \\boxed; of several boxes the last.
words          are compared only where the truth is in \\text{...}; any other truth in words cannot be graded.
not finite     NaN, an infinity alone and divisions by zero equal nothing, not even themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmgym.verifiers.answers import Parsed, parse
from llmgym.verifiers.compare import is_gradable, is_small, same, separates
from llmgym.verifiers.exact import canonical, decimal_key
from llmgym.verifiers.extract import MAX_RESPONSE, RUN_ON_HEADS, answer_text
from llmgym.verifiers.normalise import OverLimits

STATUSES = ("correct", "wrong", "no_answer", "unparsable_truth", "over_limits", "timed_out", "needs_extra")
TIME_LIMIT = 1.0
PENDING = "pending"
# A last line that is a marker and a plain number: nearly every response of a trained model. The rest goes the
# general way, with the same result.
PLAIN_LINE = re.compile(
    r"(?:####|A:) ?(\$?(-?)([0-9]{1,3}(?:,[0-9]{3}){1,9}|[0-9]{1,40})(?:\.([0-9]{1,40}))?)"
)


@dataclass(frozen=True)
class Grades:
    """The grades of N responses.

    score: float64 ``[N]``, 1 for a correct answer, else 0. answers: the extracted answers ``[N]`` as
    written, None where there is none. status: ``[N]`` strings out of STATUSES. "unparsable_truth" (no
    response can be graded against this truth),
        "over_limits", "timed_out" and "needs_extra" (an expression, and sympy is not installed) say that no
        comparison was made: their score of 0 is no statement about the answer.
    """

    score: NDArray[np.float64]
    answers: list[str | None]
    status: NDArray[np.str_]


class _NeedsSympy(Exception):
    """The comparison meets expressions."""


def _no_oracle(answer: Parsed, truth: Parsed) -> bool:
    raise _NeedsSympy


def extract(response: str) -> str | None:
    """The answer that a response states, as written ("1,236", "\\frac{3}{4}"), or None.

    Only the response is given: what a prompt says is never an answer.
    """
    if not isinstance(response, str):
        raise TypeError(f"response: got {type(response).__name__}; allowed: a text")
    if len(response) > MAX_RESPONSE:
        return None
    try:
        return answer_text(response)
    except OverLimits:
        return None


def is_correct(response: str, truth: str, time_limit: float = TIME_LIMIT) -> bool:
    """Whether a response states the true answer. The row's status is in `grade`."""
    return bool(grade([response], [truth], time_limit=time_limit).score[0])


def grade(responses: Sequence[str], truths: Sequence[str], time_limit: float = TIME_LIMIT) -> Grades:
    """Grade N responses against N truths (answers alone, not solutions); nothing is kept between rows.

    time_limit: seconds that sympy gets for one row. Raises TypeError for a row that is no text and ValueError
    for unequal lengths or a time limit that is none; no content of a response raises.
    """
    if len(responses) != len(truths):
        raise ValueError(f"truths: got {len(truths)}; allowed: {len(responses)}, one per response")
    if not 0 < time_limit < float("inf"):
        raise ValueError(f"time_limit: got {time_limit}; allowed: a finite number of seconds above 0")
    answers: list[str | None] = []
    status: list[str] = []
    pending: list[int] = []
    match_line = PLAIN_LINE.fullmatch
    for row, (response, truth) in enumerate(zip(responses, truths, strict=True)):
        if not isinstance(response, str) or not isinstance(truth, str):
            raise TypeError(
                f"row {row}: got {type(response).__name__} and {type(truth).__name__}; allowed: texts"
            )
        line = match_line(response, response.rfind("\n") + 1)
        if line is not None and len(truth) < 100:
            key = decimal_key(truth)
            if key is not None and not _needs_reading(response):
                answer, sign, whole, decimals = line.groups()
                right = canonical(sign, whole.replace(",", ""), decimals or "") == key
                answers.append(answer)
                status.append("correct" if right else "wrong")
                continue
        stated, result = _grade_one(response, truth)
        answers.append(stated)
        status.append(result)
        if result == PENDING:
            pending.append(row)
    if pending:
        from llmgym.verifiers.pool import grade_expressions  # only now: most batches need no processes

        pairs = [(answers[row] or "", truths[row]) for row in pending]
        for row, result in zip(pending, grade_expressions(pairs, time_limit), strict=True):
            status[row] = result
    statuses = np.array(status, dtype=np.str_)
    return Grades((statuses == "correct").astype(np.float64), answers, statuses)


def _needs_reading(response: str) -> bool:
    """Whether anything before the last line can matter to the answer: see extract.py, rules 1 and 2."""
    return (
        len(response) > MAX_RESPONSE or "think>" in response or any(head in response for head in RUN_ON_HEADS)
    )


def _grade_one(response: str, truth: str) -> tuple[str | None, str]:
    """The answer of one response and its status, which is PENDING where sympy has to decide."""
    try:
        wanted = parse(truth)
    except OverLimits:
        return extract(response), "unparsable_truth"
    if not is_gradable(wanted, truth):
        return extract(response), "unparsable_truth"
    if len(response) > MAX_RESPONSE:
        return None, "over_limits"
    answer = None
    try:
        answer = answer_text(response)
        if answer is None:
            return None, "no_answer"
        said = parse(answer, commas_separate=separates(wanted))
        return answer, "correct" if same(said, wanted, _no_oracle) else "wrong"
    except OverLimits:
        return answer, "over_limits"
    except _NeedsSympy:
        return answer, PENDING if answer is not None and is_small(answer) else "over_limits"
