"""Writing files so that a killed process never leaves half a file, and plain JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np


@contextmanager
def replace_file(path: Path) -> Iterator[IO[str]]:
    """Open a temporary file for text; it takes the place of `path` when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut may keep the rename and lose the text
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
    text = json.dumps(to_plain(value), indent=2, allow_nan=False)
    with replace_file(path) as file:
        file.write(text + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where it is missing or is no JSON."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
