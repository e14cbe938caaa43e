"""Checks of logged arrays: each error names the field, the row, the value and what is allowed.

They look at some thousand rows at a time, so that a million rows need hardly more memory than they take.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

CHUNK = 8_192  # rows that are looked at together: what is made of them stays in the cache


def _array(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: {error}; allowed: rows of one shape") from error
    if array.ndim == 0:
        raise ValueError(f"{name}: got {values!r}; allowed: an array with one row per transition")
    return array


def as_numbers(name: str, values: Any) -> np.ndarray:
    """An array of real numbers with a first axis, for which nothing is copied if it is one."""
    array = _array(name, values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: got dtype {array.dtype}; allowed: real numbers")
    return array


def check_rows(name: str, array: np.ndarray, n: int) -> None:
    """Raise ValueError unless there are n rows."""
    if len(array) != n:
        raise ValueError(f"{name}: got {len(array)} rows; allowed: {n}, as many as observations")


def as_column(name: str, array: np.ndarray, n: int) -> np.ndarray:
    """[n] out of [n] or [n, 1]."""
    check_rows(name, array, n)
    if array.shape not in ((n,), (n, 1)):
        raise ValueError(f"{name}: got shape {array.shape}; allowed: ({n},) or ({n}, 1)")
    return array.reshape(n)


def as_actions(values: Any, n: int) -> np.ndarray:
    """[n, A] of a float dtype, or [n] int64: the dtype decides, whatever the values."""
    array = _array("actions", values)
    check_rows("actions", array, n)
    if array.dtype.kind == "f" and array.ndim <= 2:
        return array.reshape(n, -1)
    if array.dtype.kind in "iu" and array.shape in ((n,), (n, 1)):
        return array.reshape(n).astype(np.int64, copy=False)
    raise ValueError(
        f"actions: got {array.dtype} of shape {array.shape}; allowed: float [n, A] of a Box, or integer [n] "
        "of a Discrete (continuous actions that are whole numbers must be given as float)"
    )


def as_flags(name: str, values: Any, n: int) -> np.ndarray:
    """bool [n] out of bool or numbers 0 and 1, [n] or [n, 1]."""
    array = as_column(name, as_numbers(name, values), n)
    if array.dtype == bool:
        return array
    wrong = np.flatnonzero((array != 0) & (array != 1))
    if len(wrong):
        raise ValueError(f"{name}: row {wrong[0]} has {array[wrong[0]]}; allowed: 0 and 1, or bool")
    return array.astype(bool)


def as_next(values: Any, observations: np.ndarray) -> np.ndarray:
    """Next observations in the shape and dtype of the observations."""
    array = as_numbers("next_observations", values)
    check_rows("next_observations", array, len(observations))
    if array.shape != observations.shape or not np.can_cast(array.dtype, observations.dtype, "same_kind"):
        raise ValueError(
            f"next_observations: got {array.dtype} of shape {array.shape}; allowed: as observations, which "
            f"are {observations.dtype} of shape {observations.shape}"
        )
    return array.astype(observations.dtype, copy=False)


def as_info(name: str, values: Any, n: int) -> np.ndarray:
    """A further array of n rows."""
    array = _array(f"infos[{name!r}]", values)
    check_rows(f"infos[{name!r}]", array, n)
    if array.dtype.kind == "O":
        raise ValueError(f"infos[{name!r}]: got objects; allowed: arrays of numbers or texts")
    return array


def chunks(n: int, rows: int = CHUNK) -> Iterator[slice]:
    """Slices that cover n rows in order, ``rows`` at a time."""
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


def _fail_at(name: str, array: np.ndarray, wrong: np.ndarray, start: int, allowed: str) -> None:
    row, *rest = np.argwhere(wrong)[0].tolist()
    column = f", column {', '.join(map(str, rest))}" if rest else ""
    value = array[start + row][tuple(rest)] if rest else array[start + row]
    raise ValueError(f"{name}: row {start + row}{column} has {value}; allowed: {allowed}")


def check_finite(name: str, array: np.ndarray) -> None:
    """Raise ValueError with the first row that has NaN or an infinity."""
    if array.dtype.kind != "f":
        return
    for part in chunks(len(array)):
        finite = np.isfinite(array[part])
        if not finite.all():
            _fail_at(name, array, ~finite, part.start, "finite numbers")


def check_bounds(
    actions: np.ndarray, low: Any, high: Any, clip: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The actions, every one within its bounds, and the bounds [A] in the actions' dtype, or [1]."""
    shape = actions.shape[1:]
    given = f"action_low={low!r}, action_high={high!r}; allowed:"
    if low is None or high is None:
        raise ValueError(f"{given} both or neither")
    try:
        # In the actions' own dtype: 0.4 as float32 lies above 0.4 as float64.
        lowest, highest = (
            np.broadcast_to(np.asarray(x), shape or (1,)).astype(actions.dtype) for x in (low, high)
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{given} numbers or arrays of shape {shape}") from error
    if not (lowest <= highest).all():
        raise ValueError(f"{given} low at most high, in every component")
    count = 0
    for part in chunks(len(actions)):
        wrong = (actions[part] < lowest) | (actions[part] > highest)
        if wrong.any() and not clip:
            allowed = (
                f"{lowest} to {highest} (action_low, action_high); where the environment itself clips them, "
                "clip_actions=True keeps what it executed"
            )
            _fail_at("actions", actions, wrong, part.start, allowed)
        count += int(wrong.reshape(len(wrong), -1).any(axis=1).sum())
    if count:
        actions = np.clip(actions, lowest, highest)
        warnings.warn(f"actions of {count} rows lay outside their bounds and were clipped", stacklevel=4)
    return actions, lowest, highest
