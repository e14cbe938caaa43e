"""Schedules: a hyper-parameter as a function of training progress.

A schedule is written as a number (constant) or as a string ``"lin_0.001"`` (from 0.001 linearly to
0), the notation of RL Zoo, so that a configuration stays plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable

Schedule = Callable[[float], float]


def schedule(value: float | str, name: str = "value") -> Schedule:
    """Turn ``0.001`` or ``"lin_0.001"`` into a function of the remaining progress.

    The function takes ``progress_remaining``, 1.0 at the start of ``learn`` and 0.0 at its end (as in
    Stable-Baselines3), and returns the value to use.

    Raises:
        ValueError: the value is neither a number nor ``"lin_<number>"``; ``name`` says which field.
    """
    if isinstance(value, str):
        prefix, _, number = value.partition("_")
        try:
            start = float(number)
        except ValueError:
            start = float("nan")
        if prefix != "lin" or start != start:
            raise ValueError(
                f"{name}={value!r} is not a schedule; allowed: a number such as 0.001, or 'lin_0.001'"
            )
        return lambda progress_remaining: start * progress_remaining
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{name}={value!r} is not a schedule; allowed: a number such as 0.001, or 'lin_0.001'"
        )
    constant = float(value)
    return lambda progress_remaining: constant
