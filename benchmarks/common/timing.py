"""Two clocks, measurements made in turns, and the ratio of two speeds pair by pair.

Wall-clock time is what a user waits; on a machine that others use too it counts their work as well.
CPU time of the process (`time.process_time`) counts its own work only, and is the steadier measure
of single-threaded code. Both are kept throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from common.stats import Estimate

Clock = Literal["wall", "cpu"]
CLOCKS: tuple[Clock, ...] = ("cpu", "wall")


@dataclass(frozen=True)
class Timing:
    """Seconds on both clocks."""

    wall: float
    cpu: float

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Timing:
    """Both clocks; only differences mean anything."""
    return Timing(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class Sample:
    """One measurement: an arm of a case did `amount` units of work in `timing`.

    Attributes:
        case: what is compared, the same for all arms that are.
        arm: who did it.
        seed, turn: samples of two arms with equal seed and turn are a pair.
        amount: environment steps; 1 where the work is one whole task, solved or trained.
        measures: what else is known of it, such as the final return.
    """

    case: str
    arm: str
    seed: int
    turn: int
    amount: float
    timing: Timing
    measures: dict[str, Any] = field(default_factory=dict)

    def rate(self, clock: Clock) -> float:
        """Units of work per second."""
        return self.amount / max(getattr(self.timing, clock), 1e-9)


# Does the work of one arm for a seed: units of work, the time they took, measures.
Work = Callable[[int], tuple[float, Timing, dict[str, Any]]]


def in_turns(
    case: str,
    arms: dict[str, Work],
    seeds: Sequence[int],
    turns: int,
    report: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Measure the arms in turns: for each seed A B A B ..., so that a busy spell meets all of them."""
    samples = []
    for seed in seeds:
        for turn in range(turns):
            for arm, work in arms.items():
                sample = Sample(case, arm, seed, turn, *work(seed))
                report(sample)
                samples.append(sample)
    return samples


def spread(values: Sequence[float]) -> Estimate:
    """Median, and the smallest and largest value in place of an interval."""
    if not len(values):
        return Estimate(None, None, None, 0)
    return Estimate(float(np.median(values)), float(min(values)), float(max(values)), len(values))


def speed_ratios(samples: Sequence[Sample], case: str, fast: str, slow: str, clock: Clock) -> list[float]:
    """How many times the rate of arm `slow` arm `fast` has, one ratio for each seed and turn.

    Raises:
        ValueError: a sample has no partner, or a pair is there twice.
    """
    pairs: list[dict[tuple[int, int], Sample]] = []
    for arm in (fast, slow):
        own = [s for s in samples if s.case == case and s.arm == arm]
        by_turn = {(s.seed, s.turn): s for s in own}
        if len(by_turn) < len(own):
            raise ValueError(f"{case}: arm {arm!r} has two samples of one seed and turn")
        pairs.append(by_turn)
    if pairs[0].keys() != pairs[1].keys():
        raise ValueError(f"{case}: {fast!r} and {slow!r} were not measured on the same seeds and turns")
    return [pairs[0][key].rate(clock) / pairs[1][key].rate(clock) for key in sorted(pairs[0])]


def rates(samples: Sequence[Sample], case: str, arm: str, clock: Clock) -> list[float]:
    """Rate of each sample of an arm."""
    return [s.rate(clock) for s in samples if s.case == case and s.arm == arm]
