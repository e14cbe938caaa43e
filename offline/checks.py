"""Checks of logged arrays: each error names the field, the row, the value and what is allowed.

They look at some thousand rows at a time, so that a million rows need hardly more memory than they take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

CHUNK = 65_536  # rows that are looked at together


def _array(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: {error}; allowed: rows of one shape") from error
    if array.ndim == 0:
        raise ValueError(f"{name}: got {values!r}; allowed: an array with one row per transition")
    return array


def as_numbers(name: str, values: Any) -> np.ndarray:
    array = _array(name, values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: got dtype {array.dtype}; allowed: real numbers")
    return array


def check_rows(name: str, array: np.ndarray, n: int) -> None:
    if len(array) != n:
        raise ValueError(f"{name}: got {len(array)} rows; allowed: {n}, as many as observations")


def as_column(name: str, array: np.ndarray, n: int) -> np.ndarray:
    check_rows(name, array, n)
    if array.shape not in ((n,), (n, 1)):
        raise ValueError(f"{name}: got shape {array.shape}; allowed: ({n},) or ({n}, 1)")
    return array.reshape(n)


def as_actions(values: Any, n: int) -> np.ndarray:
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
    array = as_column(name, as_numbers(name, values), n)
    wrong = np.flatnonzero((array != 0) & (array != 1))
    if len(wrong):
        raise ValueError(f"{name}: row {wrong[0]} has {array[wrong[0]]}; allowed: 0 and 1, or bool")
    return array.astype(bool)


def as_next(values: Any, observations: np.ndarray) -> np.ndarray:
    array = as_numbers("next_observations", values)
    check_rows("next_observations", array, len(observations))
    if array.shape != observations.shape or not np.can_cast(array.dtype, observations.dtype, "same_kind"):
        raise ValueError(
            f"next_observations: got {array.dtype} of shape {array.shape}; allowed: as observations, which "
            f"are {observations.dtype} of shape {observations.shape}"
        )
    array = array.astype(observations.dtype, copy=False)
    check_finite("next_observations", array)
    return array


def as_info(name: str, values: Any, n: int) -> np.ndarray:
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
    if array.dtype.kind != "f":
        return
    for part in chunks(len(array)):
        finite = np.isfinite(array[part])
        if not finite.all():
            _fail_at(name, array, ~finite, part.start, "finite numbers")


def check_bounds(actions: np.ndarray, about: dict[str, Any], low: Any, high: Any) -> dict[str, list[Any]]:
    """The bounds as lists for the metadata, after a check of every action; empty without bounds."""
    low = about.get("action_low") if low is None else low
    high = about.get("action_high") if high is None else high
    if low is None and high is None:
        return {}
    if low is None or high is None:
        raise ValueError(f"action_low={low!r}, action_high={high!r}; allowed: both, or neither")
    shape = actions.shape[1:]
    try:
        # In the actions' own dtype: 0.4 as float32 lies above 0.4 as float64.
        bounds = [np.broadcast_to(np.asarray(x), shape or (1,)).astype(actions.dtype) for x in (low, high)]
    except ValueError as error:
        given = f"action_low={low!r}, action_high={high!r}"
        raise ValueError(f"{given}; allowed: numbers of shape {shape}") from error
    for part in chunks(len(actions)):
        wrong = (actions[part] < bounds[0]) | (actions[part] > bounds[1])
        if wrong.any():
            allowed = (
                f"{low} to {high} (action_low, action_high); if the environment clipped them, store what it "
                "executed: np.clip(actions, action_low, action_high)"
            )
            _fail_at("actions", actions, wrong, part.start, allowed)
    return {"action_low": bounds[0].tolist(), "action_high": bounds[1].tolist()}
