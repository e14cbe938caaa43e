"""Checks of what callers hand to an environment: each error names field, row, value, and range."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Text
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def did_you_mean(name: object, allowed: Iterable[str], before: str = "; ", after: str = "") -> str:
    """``did you mean 'nearest'?`` between two pieces of text; nothing where no allowed name is near."""
    near = get_close_matches(name, list(allowed), n=1) if isinstance(name, str) else []
    return f"{before}did you mean {near[0]!r}?{after}" if near else ""


def check_name(field: str, name: object, allowed: Sequence[str]) -> str:
    """`name` if it is one of `allowed`, else a ValueError that suggests the nearest one."""
    if isinstance(name, str) and name in allowed:
        return name
    choices = ", ".join(repr(choice) for choice in allowed)
    raise ValueError(f"{field}: got {name!r}{did_you_mean(name, allowed, ' (', ')')}; allowed: {choices}")


def check_count(field: str, value: object) -> int:
    """`value` if it is an integer of at least 1, else a ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{field}: got {value!r}; allowed: an integer >= 1")
    return int(value)


def check_beta(beta: float) -> float:
    """The weight of a KL penalty if it is a finite number >= 0, else a ValueError."""
    if not (np.isfinite(beta) and beta >= 0.0):
        raise ValueError(f"beta: got {beta!r}; allowed: a finite number >= 0")
    return float(beta)


def check_options(options: dict[str, Any] | None, allowed: Sequence[str]) -> dict[str, Any]:
    """The options of a reset (none: an empty dict), every key being one of `allowed`."""
    for name in options or {}:
        check_name("options", name, allowed)
    return options or {}


def as_integers(field: str, values: Any, rows: IntArray, low: int, high: int) -> IntArray:
    """`values` [k], those of `rows`, as integers from `low` to `high`, both included."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{field}: got {array.dtype} values; allowed: integers {low} to {high}")
    wrong = (array < low) | (array > high)
    if wrong.any():
        named = ", ".join(
            f"row {row} has {value}"
            for row, value in zip(rows[wrong][:5].tolist(), array[wrong][:5].tolist(), strict=True)
        )
        more = f" and {wrong.sum() - 5} more rows" if wrong.sum() > 5 else ""
        raise ValueError(f"{field}: {named}{more}; allowed: integers {low} to {high}")
    return array.astype(np.int64)


def as_actions(actions: Any, rows: IntArray, num_rows: int, space: Discrete | Text) -> NDArray[Any]:
    """The actions of `rows`, [k], out of one per row of the batch, [N]."""
    if isinstance(space, Text):
        return as_texts("action", actions, rows, num_rows, space)
    array = np.asarray(actions)
    if array.shape != (num_rows,):
        raise ValueError(f"action: got shape {array.shape}; allowed: ({num_rows},), one per row")
    low = int(space.start)
    return as_integers("action", array[rows], rows, low, low + int(space.n) - 1)


def as_texts(field: str, texts: Any, rows: IntArray, num_rows: int, space: Text) -> NDArray[Any]:
    """The texts of `rows`, objects [k], out of one per row of the batch, [N]; each one of the space."""
    if not isinstance(texts, (list, tuple, np.ndarray)) or len(texts) != num_rows:
        count = f" of {len(texts)}" if hasattr(texts, "__len__") else ""
        raise ValueError(
            f"{field}: got {type(texts).__name__}{count}; allowed: {num_rows} texts, one per row"
        )
    chosen = np.empty(len(rows), dtype=object)
    for k, row in enumerate(rows.tolist()):
        text = texts[row]
        if not isinstance(text, str):
            raise TypeError(f"{field}: row {row} has {type(text).__name__}; allowed: a text")
        if not space.min_length <= len(text) <= space.max_length:
            raise ValueError(
                f"{field}: row {row} has {len(text)} characters; "
                f"allowed: {space.min_length} to {space.max_length}"
            )
        strange = set(text) - space.character_set
        if strange:
            place = min(text.index(character) for character in strange)
            raise ValueError(
                f"{field}: row {row} has {text[place]!r} (U+{ord(text[place]):04X}) at place {place}; "
                f"allowed: the characters {space.characters!r}"
            )
        chosen[k] = str(text)  # no np.str_ of the caller's array
    return chosen


def as_task_ids(task_id: Any, rows: IntArray, num_rows: int, num_tasks: int) -> IntArray:
    """The task ids of `rows`, [k], out of one for all rows or one per row of the batch, [N]."""
    array = np.asarray(task_id)
    if array.shape not in ((), (num_rows,)):
        raise ValueError(
            f"task_id: got shape {array.shape}; allowed: one integer for all rows, "
            f"or ({num_rows},), one per row"
        )
    array = np.broadcast_to(array, (num_rows,))
    return as_integers("task_id", array[rows], rows, 0, num_tasks - 1)


def as_reset_mask(mask: Any, num_rows: int) -> NDArray[np.bool_]:
    """The rows to reset as bool [N], at least one of them True; Gymnasium's conditions."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        kind = f"{mask.dtype} array" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise TypeError(f"reset_mask: got {kind}; allowed: a bool array of shape ({num_rows},)")
    if mask.shape != (num_rows,):
        raise ValueError(f"reset_mask: got shape {mask.shape}; allowed: ({num_rows},)")
    if not mask.any():
        raise ValueError("reset_mask: all False; allowed: at least one True")
    return mask
