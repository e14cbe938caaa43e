"""Tables on the terminal and as CSV, with intervals written as "123 [110, 140]"."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agents.files import replace_file
from common.stats import Estimate


def make_console() -> Console:
    """A console that is wide enough for a table when the output goes to a file or a pipe."""
    return Console(width=max(shutil.get_terminal_size((120, 24)).columns, 100))


def number(value: float | None, digits: int = 1, missing: str = "-") -> str:
    """`value` with `digits` decimals, or `missing` for None."""
    return missing if value is None else f"{value:,.{digits}f}"


def interval(estimate: Estimate, digits: int = 1, missing: str = "-") -> str:
    """ "123 [110, 140]"; only the value where there is no interval."""
    value, low, high = (
        number(x, digits, missing) for x in (estimate.value, estimate.low, estimate.high)
    )
    return value if estimate.low is None and estimate.high is None else f"{value} [{low}, {high}]"


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str | None = None,
) -> None:
    """Print a table; the first column is left-aligned, the others right-aligned."""
    # Text, here and below: "[...]" is no markup.
    shown = None if caption is None else Text(caption)
    table = Table(title=title, caption=shown, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    """A record with every Estimate as the columns name, name_low, name_high, name_n."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Estimate):
            flat |= {
                name: value.value,
                f"{name}_low": value.low,
                f"{name}_high": value.high,
                f"{name}_n": value.n,
            }
        else:
            flat[name] = value
    return flat


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write records with equal keys; Estimates become four columns, None an empty cell."""
    flat = [flatten(row) for row in rows]
    with replace_file(path) as file:
        writer = csv.DictWriter(file, fieldnames=list(flat[0]) if flat else [])
        writer.writeheader()
        writer.writerows(flat)
