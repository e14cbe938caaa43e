"""The figure of benchmarks/memory_budget.py: stacked bars of the budget, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from common.memory_measure import Measured
from common.memory_model import KINDS, ROLES
from common.plots import PALETTE, new_figure, save_figure
from common.tables import number

COLOURS = dict(zip(ROLES, PALETTE, strict=False))
# A role has one colour, which is paler for what comes on top of the weights.
SHADES = dict(zip(KINDS, (1.0, 0.65, 0.42, 0.22), strict=True))
DEVICE_GB = 80  # a common size of one accelerator


def draw(params: float, rows: Sequence[Any], measured: Sequence[Measured], path: Path) -> Path:
    """The budget in GB, and with measurements a second panel in MB; the path of the PNG."""
    figure, axes = new_figure(1, 2 if measured else 1, width=7.6, height=4.8)
    draw_budget(axes[0, 0], params, rows)
    if measured:
        draw_measured(axes[0, 1], measured)
    return save_figure(figure, path)


def label(method: str, lora_rank: int | None) -> str:
    return f"{method}\n{'full' if lora_rank is None else f'LoRA, rank {lora_rank}'}"


def short(size: float) -> str:
    """Three digits or more."""
    return number(size, 0 if size >= 100 else 1)


def stack(panel: Axes, y: int, parts: Sequence[Any], unit: float) -> float:
    """One bar, a piece for each role and kind; its length in `unit`."""
    left = 0.0
    for part in parts:
        for kind in KINDS:
            width = getattr(part, kind) / unit
            panel.barh(
                y, width, left=left, height=0.7, color=COLOURS[part.role], alpha=SHADES[kind],
                edgecolor="white", linewidth=0.8,
            )  # fmt: skip
            left += width
    return left


def draw_budget(panel: Axes, params: float, rows: Sequence[Any]) -> None:
    """A bar for each method, with its total in GB and GiB."""
    longest = max(row.total_gb for row in rows)
    for y, row in enumerate(rows):
        end = stack(panel, y, row.parts, 1e9)
        panel.text(
            end + 0.01 * longest, y, f"{short(row.total_gb)} GB ({short(row.total_gib)} GiB)",
            va="center", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    if 1.2 * longest > DEVICE_GB:
        panel.axvline(DEVICE_GB, color="black", linestyle=":", linewidth=1.2, zorder=1)
        # Beside the LoRA bars, which are short.
        text = f"one accelerator of {DEVICE_GB} GB"
        panel.text(DEVICE_GB + 0.01 * longest, 5.5, text, fontsize=8, va="center")
    finish(panel, [label(row.method, row.lora_rank) for row in rows])
    panel.set_xlim(0, 1.36 * longest)
    panel.set_xlabel("GB (1e9 bytes), without activations and KV cache")
    panel.set_title(f"models of {params / 1e9:g} billion parameters")
    panel.legend(
        handles=[Patch(color=COLOURS[role], label=role) for role in ROLES]
        + [Patch(color="black", alpha=SHADES[kind], label=kind) for kind in KINDS],
        ncols=2, fontsize=8, loc="lower right",
    )  # fmt: skip


def draw_measured(panel: Axes, measured: Sequence[Measured]) -> None:
    """Predicted bars, and marks for what tensors and process really took."""
    for place, x in enumerate(measured):
        stack(panel, place, x.predicted, 1e6)
    y = np.arange(len(measured))
    panel.plot(
        [x.measured_total / 1e6 for x in measured], y, "|", color="black", markersize=16, markeredgewidth=2,
        label="measured: storage of tensors",
    )  # fmt: skip
    for field, marker, text in (
        ("resident", "o", "measured: growth of the process"),
        ("peak", "x", "its peak, with activations of 64 tokens"),
    ):
        sizes = [getattr(m, field) for m in measured]
        known = [(size / 1e6, i) for i, size in enumerate(sizes) if size is not None]
        if known:
            style: dict[str, Any] = {"markerfacecolor": "none"} if marker == "o" else {}
            panel.plot(*zip(*known, strict=True), marker, color="black", markersize=6, label=text, **style)
    finish(panel, [label(m.method, m.lora_rank) for m in measured])
    panel.set_xlim(left=0)
    panel.set_xlabel("MB (1e6 bytes)")
    panel.set_title("small real models: predicted (bars) and measured")
    panel.legend(fontsize=8, loc="lower right")


def finish(panel: Axes, labels: Sequence[str]) -> None:
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
