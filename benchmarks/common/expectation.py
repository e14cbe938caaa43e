"""Whether the folklore on PPO's clip range held: "0.2 is the best balance, 0.1 slow, 0.3 unstable".

Three claims, each a comparison of two groups of runs by the probability that a run of the one has
the larger value (`common.stats.probability_larger`). A claim holds if the 95% interval lies above
0.5, is contradicted if it lies below, and else the groups are not distinguishable:

- 0.1 is slow: a run at 0.1 needs more episodes to the threshold than one at 0.2;
- 0.3 is unstable: the returns of a run at 0.3 after the threshold have a larger standard deviation
  than at 0.2, among the runs that reach it;
- 0.2 is best: the last 100 episodes of a run at 0.2 have a larger mean than at 0.1, and than at
  0.3.

The expectation held if all comparisons hold, did not hold if one is contradicted, and is else not
confirmed. A comparison needs four runs in each group: with three each, equal groups come out
completely apart in one case of ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.stats import Estimate, probability_larger
from common.tables import interval

HELD, CONTRADICTED, OPEN = "held", "contradicted", "not distinguishable"
CLIPS = (0.1, 0.2, 0.3)
MIN_RUNS = 4


@dataclass(frozen=True)
class RunMeasures:
    """Measures of one run; None where it never reached the threshold (or has no episodes)."""

    episodes_to_threshold: int | None
    std_after: float | None
    last_mean: float | None


@dataclass(frozen=True)
class Claim:
    """One comparison: what was expected, the probability that it is so, and the verdict."""

    text: str
    probability: Estimate
    verdict: str


@dataclass(frozen=True)
class Expectation:
    """The verdict ("held", "did not hold", "not confirmed"), its claims, and the line to print."""

    verdict: str
    claims: list[Claim]
    line: str


def judge(groups: Mapping[float, Sequence[RunMeasures]]) -> Expectation:
    """Judge the expectation from the runs of each clip range, which include 0.1, 0.2 and 0.3."""
    low, middle, high = (groups[clip] for clip in CLIPS)

    def known(runs: Sequence[RunMeasures], name: str) -> list[float]:
        return [value for run in runs if (value := getattr(run, name)) is not None]

    claims = [
        _claim(
            "0.1 slower than 0.2",
            [run.episodes_to_threshold for run in low],
            [run.episodes_to_threshold for run in middle],
        ),
        _claim("0.3 less stable than 0.2", known(high, "std_after"), known(middle, "std_after")),
        _claim("0.2 ends higher than 0.1", known(middle, "last_mean"), known(low, "last_mean")),
        _claim("0.2 ends higher than 0.3", known(middle, "last_mean"), known(high, "last_mean")),
    ]
    verdicts = {claim.verdict for claim in claims}
    if verdicts == {HELD}:
        verdict = "held"
    elif CONTRADICTED in verdicts:
        verdict = "did not hold"
    else:
        verdict = "not confirmed"
    details = "; ".join(
        f"{claim.text}: {claim.verdict}"
        + (f" (P = {interval(claim.probability, 2)})" if claim.probability.n else "")
        for claim in claims
    )
    line = (
        f'Expectation "0.2 is the best balance, 0.1 slow, 0.3 unstable": {verdict}. {details}. '
        "P: share of the pairs of runs in which it is so, with its 95% interval."
    )
    return Expectation(verdict, claims, line)


def _claim(text: str, larger: Sequence[float | None], smaller: Sequence[float | None]) -> Claim:
    probability = probability_larger(larger, smaller)
    if probability.n < MIN_RUNS or probability.low is None or probability.high is None:
        return Claim(text, probability, "too few runs to say")
    if probability.low > 0.5:
        return Claim(text, probability, HELD)
    return Claim(text, probability, CONTRADICTED if probability.high < 0.5 else OPEN)
