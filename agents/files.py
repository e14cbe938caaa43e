"""Writing files so that a killed process never leaves half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def replace_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file for writing that takes the place of ``path`` at the end, or not at all.

    It is on the disk before it is renamed, so that a power cut cannot leave an empty file either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        # newline="": what is written is what is on disk, as the csv module asks.
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "")
        with temporary.open(mode, encoding=encoding, newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    """Write plain data as indented JSON, atomically."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with replace_file(path) as file:
        file.write(text + "\n")


def cut_lines(path: Path, last_step: int) -> None:
    """Cut a file of JSON lines behind the last whole line whose ``step`` is at most ``last_step``."""
    if not path.exists():
        return
    length = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            length += len(line)
    os.truncate(path, length)
