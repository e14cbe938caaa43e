"""The figure of the throughput benchmark, from its samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from common.plots import MARKERS, PALETTE, new_figure, save_figure
from common.speed_env import ARMS, NATIVE, SYNC, env_cases
from common.speed_profile import PIECES, shares
from common.speed_report import IDENTICAL, POOL, THRESHOLD, Ratio
from common.speed_tokens import TOKEN_CASES, TOKEN_PIECES
from common.timing import CLOCKS, Sample, speed_ratios


def speed_figure(
    samples: Sequence[Sample],
    ratios: Sequence[Ratio],
    profiles: dict[str, list[dict[str, float]]],
    token_profiles: dict[str, list[dict[str, float]]],
    path: Path,
) -> Path:
    """A panel for each kind of question that was measured; profiles of PPO, and of the token loop."""
    panels: list[Any] = []
    if any(sample.arm in ARMS for sample in samples):
        panels.append(lambda axes: draw_env(axes, samples))
    if any(ratio.case in (IDENTICAL, THRESHOLD, POOL) for ratio in ratios):
        agents_only = [ratio for ratio in ratios if ratio.case in (IDENTICAL, THRESHOLD, POOL)]
        panels.append(lambda axes: draw_ratios(axes, samples, agents_only, "PPO: how many times as fast"))
    if any(sample.case == THRESHOLD for sample in samples):
        panels.append(lambda axes: draw_threshold(axes, samples))
    if any(sample.case in TOKEN_CASES for sample in samples):
        tokens_only = [ratio for ratio in ratios if ratio.case in TOKEN_CASES]
        panels.append(lambda axes: draw_ratios(axes, samples, tokens_only, "Tokens: how many times as fast"))
    for pieces, runs, title in (
        (TOKEN_PIECES, token_profiles, "Where the token loop's time goes"),
        (PIECES, profiles, "Where our PPO's time goes"),
    ):
        if any(runs.values()):
            panels.append(partial(draw_profile, pieces=pieces, profiles=runs, title=title))
    columns = min(2, len(panels))
    figure, grid = new_figure(-(-len(panels) // columns), columns, width=7.6, height=4.4)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for draw, axes in zip(panels, grid.flat, strict=False):
        draw(axes)
    return save_figure(figure, path)


def draw_env(axes: Axes, samples: Sequence[Sample]) -> None:
    """Steps per second over the number of environments."""
    for index, case in enumerate(env_cases()):
        for arm, style in ((NATIVE, "-"), (SYNC, "--")):
            own = [s for s in samples if s.arm == arm and s.case.rpartition(" x ")[0] == case.name]
            sizes = sorted({s.measures["n_envs"] for s in own})
            speeds = [[s.rate("cpu") for s in own if s.measures["n_envs"] == size] for size in sizes]
            axes.plot(
                sizes, [np.median(v) for v in speeds], style, marker=MARKERS[index], color=PALETTE[index],
                label=f"{case.name}, {arm}", markersize=4,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("environments")
    axes.set_ylabel("environment steps per CPU second")
    axes.set_title("Stepping environments")
    axes.legend(fontsize=7)


def draw_ratios(axes: Axes, samples: Sequence[Sample], ratios: Sequence[Ratio], title: str) -> None:
    """Every pair's ratio as a point, its median as a bar, and the target."""
    for row, ratio in enumerate(ratios):
        for clock, shift, colour in zip(CLOCKS, (-0.15, 0.15), (PALETTE[0], PALETTE[4]), strict=True):
            values = speed_ratios(samples, ratio.case, ratio.fast, ratio.slow, clock)
            label = {"cpu": "CPU time", "wall": "wall clock"}[clock] if row == 0 else None
            axes.plot(values, [row + shift] * len(values), "o", color=colour, alpha=0.5, markersize=5)
            axes.plot([np.median(values)], [row + shift], "|", color=colour, markersize=16, label=label)
        if ratio.target is not None:
            label = "target" if row == 0 else None
            axes.plot([ratio.target] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1.2, label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(ratios)), [f"{r.case}\n{r.fast} / {r.slow}" for r in ratios], fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("times as fast, pair by pair")
    axes.set_title(title)
    axes.legend(fontsize=8)


def draw_threshold(axes: Axes, samples: Sequence[Sample]) -> None:
    """CPU seconds to the score of every run; hollow where the budget ended it."""
    arms = list(dict.fromkeys(s.arm for s in samples if s.case == THRESHOLD))
    for row, arm in enumerate(arms):
        for sample in (s for s in samples if s.case == THRESHOLD and s.arm == arm):
            face = PALETTE[row] if sample.measures["reached"] else "none"
            axes.plot([sample.timing.cpu], [row], "o", color=PALETTE[row], markerfacecolor=face, alpha=0.7)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("CPU seconds (hollow: not reached within the budget)")
    axes.set_title("CartPole-v1: until the mean return of 100 episodes is 475")


def draw_profile(
    axes: Axes, pieces: Sequence[str], profiles: dict[str, list[dict[str, float]]], title: str
) -> None:
    """Median shares of the pieces, in their sum, as stacked bars."""
    names = [name for name, runs in profiles.items() if runs]
    runs = [[shares({piece: run[piece] for piece in pieces}) for run in profiles[name]] for name in names]
    left = np.zeros(len(names))
    for index, piece in enumerate(pieces):
        width = np.array([100 * np.median([run[piece] for run in own]) for own in runs])
        colour, hatch = PALETTE[index % len(PALETTE)], "///" if index >= len(PALETTE) else None
        axes.barh(names, width, left=left, color=colour, hatch=hatch, edgecolor="white", label=piece)
        left += width
    axes.set_xlabel("% of the CPU time")
    axes.set_title(title)
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    axes.grid(visible=False, axis="y")
