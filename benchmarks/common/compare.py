"""An analytic value beside what was measured, and how many standard errors lie between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MARGIN = 4.0  # standard errors: an agreement is missed by chance in one of 16,000 comparisons


@dataclass(frozen=True)
class Comparison:
    """One number twice; `z` is the difference in standard errors of the measurement."""

    analytic: float
    measured: float
    standard_error: float
    z: float

    @property
    def agrees(self) -> bool:
        """The two are within `MARGIN` standard errors."""
        return abs(self.z) <= MARGIN


def compare(analytic: float, samples: np.ndarray) -> Comparison:
    """The mean of independent samples ``[n]`` beside its analytic value.

    Where the samples do not spread beyond rounding there is no standard error to count in: z is then 0 or,
    for another value, infinite.

    Raises:
        ValueError: fewer than two samples.
    """
    samples = np.asarray(samples, dtype=float)
    if samples.ndim != 1 or len(samples) < 2:
        raise ValueError(f"samples of shape {samples.shape}: need one axis of at least 2")
    measured = float(samples.mean())
    error = float(samples.std(ddof=1) / np.sqrt(len(samples)))
    difference = measured - analytic
    rounding = 1e-12 * max(1.0, abs(measured), abs(analytic))
    if error > rounding:
        return Comparison(analytic, measured, error, difference / error)
    return Comparison(
        analytic, measured, error, 0.0 if abs(difference) <= rounding else math.copysign(math.inf, difference)
    )
