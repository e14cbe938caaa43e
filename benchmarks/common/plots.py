"""Figures: one style, colours that the colour-blind tell apart, curves with bootstrap bands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there need not be a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.stats import bootstrap_interval

# Okabe and Ito, "Color universal design" (2008), in an order in which neighbours differ in
# lightness too; black is left to reference lines.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
}
plt.rcParams.update(STYLE)
CURVE_RESAMPLES = 1_000  # per point of a curve; a band needs no third digit


def new_figure(
    rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 4.2, **kwargs: Any
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes ``[rows, columns]``, each `width` by `height` inches."""
    size = (width * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, **kwargs)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG and forget it; the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    plt.close(figure)
    return path


def on_grid(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The latest value of a curve at each point of `grid`, NaN before its first point.

    x and y are ``[E]`` with x increasing; the result is ``[len(grid)]``. A value holds until the
    next, so nothing is read from the future, as interpolation would.
    """
    position = np.searchsorted(x, grid, side="right") - 1
    if not len(x):
        return np.full(len(grid), np.nan)
    return np.where(position >= 0, np.asarray(y, dtype=float)[np.maximum(position, 0)], np.nan)


def draw_curves(
    axes: Axes,
    runs: Sequence[tuple[np.ndarray, np.ndarray]],
    label: str,
    index: int,
    n_points: int = 200,
) -> None:
    """Draw the mean of some runs with its bootstrap band, and each run faintly.

    Each run is (x, y). The mean covers the stretch in which every run has values; `index` chooses
    colour.
    """
    colour = PALETTE[index % len(PALETTE)]
    runs = [(x, y) for x, y in runs if len(x)]
    if not runs:
        return
    for x, y in runs:
        axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.7)
    start, stop = max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs)
    if start > stop:
        return
    grid = np.linspace(start, stop, n_points)
    values = np.stack([on_grid(x, y, grid) for x, y in runs])
    axes.plot(grid, values.mean(axis=0), color=colour, label=label)
    if len(runs) > 1:
        low, high = bootstrap_interval(values, resamples=CURVE_RESAMPLES)
        axes.fill_between(grid, low, high, color=colour, alpha=0.2, linewidth=0)
