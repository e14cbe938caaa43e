"""Two graders on the same rows, for benchmarks/grader.py: agreement, speed, and what hostile answers cost."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from common.grader_rows import Row
from common.stats import Estimate, estimate
from common.timing import now
from llmgym.verifiers.math import grade

SLOW = 2.0
KILL_AFTER = (
    10.0  # seconds for one row of math-verify, whose own limits are 5 s for parsing and for comparing
)


@dataclass(frozen=True)
class Agreement:
    """Grades of one set of rows: how many agree with the label, and the other ways to end."""

    rows: str
    grader: str
    n: int
    agree: int
    false_accepts: int
    false_rejects: int
    killed: int
    slow: int  # rows that took longer than SLOW seconds
    disagreements: list[str]


@dataclass(frozen=True)
class Speed:
    """Responses per second of processor time, ``[rounds]`` each, and the ratio within each round."""

    ours: Estimate
    math_verify: Estimate | None
    ratio: Estimate | None
    samples: dict[str, list[float]]


@dataclass(frozen=True)
class Hostile:
    """Seconds for clean rows alone and with hostile ones among them; `bound` is twice the first plus the
    limits."""

    n_clean: int
    n_hostile: int
    n_timed_out: int
    clean: float
    mixed: float
    bound: float
    wrong_scores: int
    statuses: dict[str, int]
    neighbours_unchanged: bool


def grade_ours(rows: Sequence[Row], time_limit: float = 1.0) -> list[bool]:
    """Our grades."""
    return (
        grade([r.response for r in rows], [r.truth for r in rows], time_limit=time_limit).score == 1
    ).tolist()


def grade_math_verify(rows: Sequence[Row], limit: int | None = None) -> list[bool]:
    """math-verify's grades, by its defaults; a truth that it reads only as LaTeX is given in dollar signs."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    grades = []
    for row in rows:
        gold = parse(row.truth, parsing_timeout=limit)
        gold = gold or parse(f"${row.truth}$", parsing_timeout=limit)
        said = parse(row.response, parsing_timeout=limit)
        grades.append(bool(verify(gold, said, timeout_seconds=limit)))
    return grades


def _serve(connection: Connection) -> None:
    grade_math_verify([Row("#### 5", "5", True)])
    connection.send("ready")
    while True:
        connection.send(grade_math_verify([connection.recv()], limit=5)[0])


def grade_ours_timed(rows: Sequence[Row], time_limit: float) -> tuple[list[bool | None], list[float]]:
    """Our grades and seconds row by row; the processes for expressions are started before."""
    grade_ours([Row(r"\boxed{2\sqrt{2}}", r"\sqrt{8}", True)] * 4, 60.0)
    grades, seconds = list[bool | None](), []
    for row in rows:
        started = time.perf_counter()
        grades += grade_ours([row], time_limit)
        seconds.append(time.perf_counter() - started)
    return grades, seconds


def grade_math_verify_timed(rows: Sequence[Row]) -> tuple[list[bool | None], list[float]]:
    """math-verify's grades and seconds, in a process that is replaced when it hangs or dies (then None)."""
    context = multiprocessing.get_context("spawn")
    grades: list[bool | None] = []
    seconds: list[float] = []
    process = connection = None
    for row in rows:
        if process is None or connection is None:
            connection, other = context.Pipe()
            process = context.Process(target=_serve, args=(other,), daemon=True)
            process.start()
            other.close()
            connection.recv()
        started = time.perf_counter()
        try:
            connection.send(row)
            if not connection.poll(KILL_AFTER):
                raise EOFError
            grades.append(connection.recv())
        except (EOFError, OSError):
            grades.append(None)
            process.kill()
            process.join()
            process = None
        seconds.append(time.perf_counter() - started)
    if process is not None:
        process.kill()
        process.join()
    return grades, seconds


def agreement(
    name: str, grader: str, rows: Sequence[Row], graded: tuple[Sequence[bool | None], Sequence[float]]
) -> Agreement:
    """Grades against labels; a row without a grade agrees with neither."""
    grades, seconds = graded
    pairs = list(zip(rows, grades, strict=True))
    return Agreement(
        name,
        grader,
        len(rows),
        sum(given == row.right for row, given in pairs),
        sum(given is True and not row.right for row, given in pairs),
        sum(given is False and row.right for row, given in pairs),
        sum(given is None for _, given in pairs),
        sum(spent > SLOW for spent in seconds),
        [row.name for row, given in pairs if row.name and given != row.right],
    )


def measure_speed(rows: Sequence[Row], rounds: int, per_round: int, with_math_verify: bool) -> Speed:
    """Both graders on the same slices of `rows`, in turns A B B A: each slice by each in every round.

    Ours takes the slice twenty times, since once is too short to be timed; it keeps nothing between rows.
    """
    repeat = 20
    samples: dict[str, list[float]] = {"ours": [], "math-verify": []}
    grade_ours(rows[:per_round])
    if with_math_verify:
        grade_math_verify(rows[:20])
    for index in range(rounds):
        start = index * per_round % max(1, len(rows) - per_round)
        slice_ = rows[start : start + per_round]
        arms = ["ours", "math-verify"] if with_math_verify else ["ours"]
        for arm in arms if index % 2 == 0 else arms[::-1]:
            before = now()
            if arm == "ours":
                grade_ours([*slice_] * repeat)
            else:
                grade_math_verify(slice_)
            spent = (now() - before).cpu
            samples[arm].append(len(slice_) * (repeat if arm == "ours" else 1) / spent)
    ratios = [a / b for a, b in zip(samples["ours"], samples["math-verify"], strict=False)]
    return Speed(
        estimate(samples["ours"]),
        estimate(samples["math-verify"]) if with_math_verify else None,
        estimate(ratios) if with_math_verify else None,
        samples | {"ratio": ratios},
    )


def measure_hostile(clean: Sequence[Row], hostile: Sequence[Row], time_limit: float, rounds: int) -> Hostile:
    """Clean rows alone and the same with `hostile` spread among them, wall-clock seconds, least of `rounds`.

    The processes for expressions are started before: that is once per program, not per batch.
    """
    grade_ours([Row(r"\boxed{2\sqrt{2}}", r"\sqrt{8}", True)] * 4, 60.0)
    every = max(1, len(clean) // len(hostile))
    mixed: list[Row] = []
    for index, row in enumerate(hostile):
        mixed += [*clean[index * every : (index + 1) * every], row]
    mixed += clean[len(hostile) * every :]
    places = {id(row) for row in hostile}
    times: dict[str, list[float]] = {"clean": [], "mixed": []}
    alone: list[bool] = []
    for _ in range(rounds):
        started = time.perf_counter()
        alone = grade_ours(clean, time_limit)
        times["clean"].append(time.perf_counter() - started)
        started = time.perf_counter()
        grades = grade([r.response for r in mixed], [r.truth for r in mixed], time_limit=time_limit)
        times["mixed"].append(time.perf_counter() - started)
    is_hostile = [id(row) in places for row in mixed]
    statuses = Counter(s for s, bad in zip(grades.status.tolist(), is_hostile, strict=True) if bad)
    among = [score == 1 for score, bad in zip(grades.score, is_hostile, strict=True) if not bad]
    timed_out = statuses["timed_out"]
    return Hostile(
        len(clean),
        len(hostile),
        timed_out,
        min(times["clean"]),
        min(times["mixed"]),
        2 * min(times["clean"]) + timed_out * time_limit,
        sum(bool(score) for score, bad in zip(grades.score, is_hostile, strict=True) if bad),
        dict(statuses),
        among == alone,
    )
