"""Statistics of benchmark runs: bootstrap intervals and measures of learning curves.

Intervals are 95% bootstrap intervals over independent runs: bias-corrected and accelerated
(Efron, "Better bootstrap confidence intervals", 1987), and the percentile interval where BCa is
undefined. The comparison of two groups is the probability of improvement of Agarwal et al., "Deep
reinforcement learning at the edge of the statistical precipice" (2021), section 4.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import DegenerateDataWarning, bootstrap

CONFIDENCE = 0.95
RESAMPLES = 5_000
WINDOW = 100  # episodes in a moving mean


@dataclass(frozen=True)
class Estimate:
    """A statistic of `n` runs with its interval; None where it is undefined."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def bootstrap_interval(
    values: np.ndarray,
    statistic: Callable[..., Any] = np.mean,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap interval of `statistic` over the runs: values ``[runs, ...]`` to two ``[...]``.

    `statistic` takes ``axis``. Columns of identical values have an interval of zero width; with
    fewer than two runs both ends are NaN.
    """
    values = np.asarray(values, dtype=float)
    shape = values.shape[1:]
    if len(values) < 2:
        return np.full(shape, np.nan), np.full(shape, np.nan)

    def interval(method: str) -> tuple[np.ndarray, np.ndarray]:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", DegenerateDataWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            limits = bootstrap(
                (values,),
                statistic,
                axis=0,
                confidence_level=confidence,
                n_resamples=resamples,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        return np.asarray(limits.low), np.asarray(limits.high)

    low, high = interval("BCa")
    undefined = ~(np.isfinite(low) & np.isfinite(high))
    if undefined.any():
        percentile_low, percentile_high = interval("percentile")
        low = np.where(undefined, percentile_low, low)
        high = np.where(undefined, percentile_high, high)
    # Exactly zero width: the mean of equal numbers may differ from them in the last digit.
    same = (values == values[0]).all(axis=0)
    exact = statistic(values, axis=0)
    return np.where(same, exact, low), np.where(same, exact, high)


def estimate(values: Sequence[float | None], statistic: Callable[..., Any] = np.mean) -> Estimate:
    """`statistic` of the values that are not None, with its interval."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if not len(known):
        return Estimate(None, None, None, 0)
    low, high = bootstrap_interval(known, statistic)
    return Estimate(
        _finite(float(statistic(known, axis=0))),
        _finite(float(low)),
        _finite(float(high)),
        len(known),
    )


def censored_median(values: Sequence[float | None]) -> Estimate:
    """Median of times to an event, None standing for "not within the budget".

    Such a run counts as later than all others, so nothing is lost by leaving runs out: the median
    is None where half the runs or more did not get there, and so is an end of the interval (the
    percentile interval, taken at values that occur: one cannot interpolate towards never).
    """
    times = np.array([np.inf if value is None else value for value in values], dtype=float)
    if not len(times):
        return Estimate(None, None, None, 0)
    median = _finite(float(np.median(times)))
    if len(times) < 2:
        return Estimate(median, None, None, len(times))
    draws = np.random.default_rng(0).integers(len(times), size=(RESAMPLES, len(times)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(
        np.median(times[draws], axis=1), [tail, 1 - tail], method="inverted_cdf"
    )
    return Estimate(median, _finite(float(low)), _finite(float(high)), len(times))


def probability_larger(a: Sequence[float | None], b: Sequence[float | None]) -> Estimate:
    """Probability that a run of `a` has a larger value than one of `b`; ties count half.

    None is larger than every number (an event not reached within the budget comes after all
    others). Percentile interval, both groups resampled. An interval on one side of 0.5 tells the
    groups apart; with five runs each, two equal groups are told apart in about 8 of 100 cases.
    """
    x, y = (np.array([np.inf if v is None else v for v in group], dtype=float) for group in (a, b))
    if not len(x) or not len(y):
        return Estimate(None, None, None, 0)
    wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)
    value = float(wins.mean())
    n = min(len(x), len(y))
    if n < 2:
        return Estimate(value, None, None, n)
    generator = np.random.default_rng(0)
    rows = generator.integers(len(x), size=(RESAMPLES, len(x), 1))
    columns = generator.integers(len(y), size=(RESAMPLES, 1, len(y)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(wins[rows, columns].mean(axis=(1, 2)), [tail, 1 - tail])
    return Estimate(value, float(low), float(high), n)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def moving_mean(values: np.ndarray, window: int = WINDOW, partial: bool = False) -> np.ndarray:
    """Mean of the last `window` values at each position, ``[E]`` to ``[E]``.

    Before the first full window: NaN, or with `partial` the mean of the values so far.
    """
    values = np.asarray(values, dtype=float)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    position = np.arange(1, len(values) + 1)
    start = np.maximum(position - window, 0)
    means = (sums[position] - sums[start]) / (position - start)
    return means if partial else np.where(position < window, np.nan, means)


def episodes_to_threshold(
    returns: np.ndarray, threshold: float, window: int = WINDOW
) -> int | None:
    """Episodes until the mean of the last `window` first reaches `threshold`; None if never."""
    reached = np.flatnonzero(moving_mean(returns, window) >= threshold)
    return int(reached[0]) + 1 if len(reached) else None


def std_after_threshold(
    returns: np.ndarray, threshold: float, window: int = WINDOW
) -> float | None:
    """Standard deviation (n - 1) of the returns of the episodes after that point.

    None where the threshold is never reached or fewer than two episodes follow.
    """
    first = episodes_to_threshold(returns, threshold, window)
    if first is None or len(returns) - first < 2:
        return None
    return float(np.std(returns[first:], ddof=1))


def last_mean(returns: np.ndarray, window: int = WINDOW) -> float | None:
    """Mean of the last `window` returns (of all, where there are fewer); None without any."""
    return float(np.mean(returns[-window:])) if len(returns) else None


def has_collapsed(returns: np.ndarray, random_returns: np.ndarray, window: int = WINDOW) -> bool:
    """Whether a run ends having lost what it had learned, or worse than acting at random.

    The gain of a run is its best `window`-episode mean less the mean of `random_returns`, the
    returns of a random policy. The run has collapsed when its last `window`-episode mean keeps
    less than half of that gain (none, for a run that never gained), by more than three standard
    errors of a random policy's mean: a run that has merely learned nothing yet has not collapsed,
    one stuck below the random policy has. False without any episode.
    """
    if not len(returns):
        return False
    window = min(window, len(returns))
    means = moving_mean(returns, window)
    level, noise = np.mean(random_returns), np.std(random_returns) / np.sqrt(window)
    gain = max(np.nanmax(means) - level, 0.0)
    return bool(means[-1] < level + 0.5 * gain - 3 * noise)
