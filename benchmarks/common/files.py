"""Results as plain JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agents import files


def to_plain(value: Any) -> Any:
    """`value` in JSON's own types.

    Arrays and tuples become lists, dataclasses objects, paths text, and numbers that JSON lacks
    (NaN, infinities) null. Raises TypeError for anything else.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} has no JSON form")


def write_json(path: Path, value: Any) -> None:
    """Write `value` (see `to_plain`) as indented JSON, whole or not at all."""
    files.write_json(path, to_plain(value))


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where it is missing or is no JSON."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
