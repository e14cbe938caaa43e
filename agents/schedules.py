"""Schedules: a hyper-parameter as a function of training progress.

A schedule is written as a number (constant) or as a string ``"lin_0.001"`` (from 0.001 linearly to
0), the notation of RL Zoo, so that a configuration stays plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

Schedule = Callable[[float], float]


def schedule(value: float | str, name: str = "value") -> Schedule:
    """Turn ``0.001`` or ``"lin_0.001"`` into a function of the remaining progress.

    The function takes ``progress_remaining``, 1.0 at the start of ``learn`` and 0.0 at its end (as in
    Stable-Baselines3), and returns the value to use.

    Raises:
        ValueError: the value is neither a finite number >= 0 nor ``"lin_<such a number>"``; ``name``
            says which field.
    """
    start = float("nan")
    if isinstance(value, str):
        prefix, _, number = value.partition("_")
        with suppress(ValueError):
            start = float(number) if prefix == "lin" else start
    elif isinstance(value, int | float) and not isinstance(value, bool):
        start = float(value)
    if not (math.isfinite(start) and start >= 0.0):
        raise ValueError(
            f"{name}={value!r} is not a schedule; allowed: a number >= 0 such as 0.001, or 'lin_0.001'"
        )
    if isinstance(value, str):
        return lambda progress_remaining: start * progress_remaining
    return lambda progress_remaining: start
