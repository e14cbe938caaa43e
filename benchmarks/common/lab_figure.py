"""The six panels of ``estimator_lab.png``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from common import lab_length as length
from common.lab_gradient import Result, make_pool
from common.lab_length import LengthResult
from common.lab_rows import Row
from common.lab_theory import prompt_objective, prompt_weight
from common.plots import MARKERS, PALETTE, new_figure, save_figure
from common.stats import Estimate

ORANGE = PALETTE[1]
# One look per estimator in all panels; those that only differ by a factor have the same mean and noise.
SHOWN = {
    "REINFORCE": ("REINFORCE", PALETTE[3], "P"),
    "ReMax": ("ReMax", PALETTE[4], "v"),
    "RLOO": ("RLOO; GRPO, no std", PALETTE[0], "o"),
    "GRPO, group std": ("GRPO, group std", ORANGE, "s"),
    "PPO, whitened": ("PPO, exact critic", PALETTE[2], "D"),
}
SIZES_SHOWN = {4: "#F2B48A", 8: ORANGE, 64: "#6E3000"}  # shades of the group's deviation


def draw(
    results: Sequence[Result], rows: Sequence[Row], lengths: Sequence[LengthResult], path: Path
) -> Path:
    """Draw and write the figure; its path."""
    figure, axes = new_figure(2, 3, width=5.5, height=4.3)
    weights_panel(axes[0, 0], results)
    objective_panel(axes[0, 1])
    noise_panel(axes[0, 2], results)
    in_reward = [row for row in rows if row.kl_in == "reward"]
    in_loss = [row for row in rows if row.kl_in == "loss"]
    training_panel(axes[1, 0], in_reward)
    shift_panel(axes[1, 1], in_loss, in_reward[0].reward_expected)
    length_panel(axes[1, 2], lengths)
    for letter, panel in zip("abcdef", axes.flat, strict=True):
        panel.set_title(f"({letter}) {panel.get_title()}", loc="left", fontsize=10.5)
        panel.set_title("")
    return save_figure(figure, path)


def weights_panel(axes: Axes, results: Sequence[Result]) -> None:
    """What dividing by the group's deviation multiplies a prompt's gradient with."""
    pool = make_pool("binary")
    rates = (pool.ref_probs * pool.proxy).sum(axis=1)
    grid = np.linspace(0.002, 0.998, 999)
    limit = prompt_weight(grid, None)
    axes.plot(grid, limit, color="black", linewidth=1.2, label=r"G = ∞: $1/\sqrt{p(1-p)}$")
    for index, (size, colour) in enumerate(SIZES_SHOWN.items()):
        axes.plot(grid, prompt_weight(grid, size), color=colour, label=f"G = {size}")
        for result in results:
            if (result.pool, result.group_size, result.estimator) == ("binary", size, "GRPO, group std"):
                # Four neighbouring prompts are one point: the rare ones are noisy.
                x, y = (np.reshape(v, (-1, 4)).mean(axis=1) for v in (rates, result.weights))
                axes.plot(x, y, MARKERS[index], color=colour, markersize=4.5)
    axes.axhline(1.0, color=PALETTE[0], linestyle="--", linewidth=1.2)
    axes.annotate("not divided: E[r]", (0.5, 1.0), xytext=(0, -11), ha="center", fontsize=8,
                  color=PALETTE[0], textcoords="offset points")  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(0.7, 12.0)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([1, 2, 5, 10])
    axes.set_xlabel("pass rate p of the prompt")
    axes.set_ylabel("weight of its gradient dp")
    axes.set_title("Dividing by the group's std: weights")
    axes.legend(fontsize=8, title="lines exact, points measured", title_fontsize=8, loc="upper center")


def objective_panel(axes: Axes) -> None:
    """The objective that has these weights, from 0 to 1."""
    grid = np.linspace(0, 1, 1_001)
    axes.plot(grid, grid, color=PALETTE[0], linestyle="--", linewidth=1.2,
              label="not divided: E[r] = p; G = 2 and 3")  # fmt: skip
    for size, colour in SIZES_SHOWN.items():
        value = prompt_objective(grid, size)
        axes.plot(grid, value / value[-1], color=colour, label=f"G = {size}")
    limit = prompt_objective(grid, None)
    axes.plot(grid, limit / limit[-1], color="black", linewidth=1.2, label=r"G = ∞: $2\,\arcsin\sqrt{p}$")
    axes.set_xlabel("pass rate p of the prompt")
    axes.set_ylabel("objective $F_G(p)$, scaled to 1 at p = 1")
    axes.set_title("... and the objective that has them")
    axes.legend(fontsize=8)


def noise_panel(axes: Axes, results: Sequence[Result]) -> None:
    """Variance at equal samples over group size, on both pools."""
    for name, (label, colour, marker) in SHOWN.items():
        for pool, style in (("binary", "-"), ("real", ":")):
            chosen = [r for r in results if (r.estimator, r.pool) == (name, pool)]
            chosen.sort(key=lambda r: r.group_size)
            x = [r.group_size for r in chosen]
            axes.plot(x, [r.noise.analytic for r in chosen], style, color=colour, linewidth=1.4)
            axes.plot(x, [r.noise.measured for r in chosen], marker, color=colour, markersize=5,
                      label=label if pool == "binary" else None)  # fmt: skip
    axes.plot([], [], "-", color="grey", label="rewards 0 and 1")
    axes.plot([], [], ":", color="grey", label="real-valued rewards")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(1.4, 400)
    axes.set_xlabel("group size G")
    axes.set_ylabel("variance per sampled answer,\nin squared lengths of the mean")
    axes.set_title("Noise of the gradient at equal samples")
    axes.legend(fontsize=8, ncols=2, loc="upper center")


def training_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Distance of the final policies from the optimum: every run and their mean."""
    for y, row in enumerate(rows):
        _runs(axes, y, [run["kl_optimum"] for run in row.runs], row.kl_optimum)
    axes.set_xscale("log")
    axes.set_xlabel("KL(policy || optimum) at equal samples, nats")
    axes.set_title("KL in the reward: all lead to the optimum")
    _name_rows(axes, rows)
    axes.legend(fontsize=8, loc="lower right")


def shift_panel(axes: Axes, rows: Sequence[Row], optimum: float) -> None:
    """Expected reward of the final policies, that of the exact resting points, and that of the optimum."""
    for y, row in enumerate(rows):
        _runs(axes, y, [run["reward"] for run in row.runs], row.reward)
        axes.plot(row.reward_expected, y, "|", color=ORANGE, markersize=19, markeredgewidth=2.5, zorder=1,
                  label=None if y else "resting point, exact")  # fmt: skip
        if row.kl_optimum.value is not None:
            axes.annotate(f"{row.kl_optimum.value:.3f}", (1.0, y), xycoords=("axes fraction", "data"),
                          xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.axvline(optimum, color="black", linewidth=1, label="optimum")
    axes.annotate("KL to\noptimum", (1.0, -1.15), xycoords=("axes fraction", "data"), xytext=(4, 0),
                  textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.set_xlabel("E[r] of the policy")
    axes.set_title("GRPO, KL in the loss: the resting point moves")
    _name_rows(axes, rows)
    axes.set_xlim(0.645, 1.015)
    axes.legend(fontsize=8, loc="lower left", markerscale=0.7)


def _runs(axes: Axes, y: int, runs: list[float], mean: Estimate) -> None:
    axes.plot(runs, np.full(len(runs), y), "o", color=PALETTE[5], markersize=4, alpha=0.55, markeredgewidth=0,
              label=None if y else "each run")  # fmt: skip
    if mean.value is None:
        return
    low, high = (mean.value if end is None else end for end in (mean.low, mean.high))
    axes.errorbar(mean.value, y, xerr=[[mean.value - low], [high - mean.value]], fmt="D", color=PALETTE[0],
                  markersize=4.5, capsize=3, label=None if y else "mean, 95% interval")  # fmt: skip


def _name_rows(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def length_panel(axes: Axes, lengths: Sequence[LengthResult]) -> None:
    """The expected gradient of the stopping probability for each loss type."""
    grid = np.geomspace(0.06, 0.7, 200)
    names = {
        "dr_grpo": ("constant (Dr. GRPO): dE[r]", PALETTE[0], "o", "-"),
        "dapo": ("token mean (DAPO): the same", PALETTE[2], "^", "--"),
        "grpo": ("mean per answer (GRPO)", ORANGE, "s", "-"),
    }
    for index, (kind, (label, colour, marker, style)) in enumerate(names.items()):
        axes.plot(grid, [length.exact_gradient(kind, q) for q in grid], style, color=colour)
        points = [r for r in lengths if r.loss_type == kind]
        axes.plot([r.stop for r in points], [r.gradient.measured for r in points], marker, color=colour,
                  markersize=5 + 3 * (kind == "dr_grpo"), fillstyle="none" if kind == "dr_grpo" else "full",
                  label=label)  # fmt: skip
        if index != 1:
            rest = length.resting_stop(kind)
            axes.annotate(
                f"rests at length {length.mean_length(rest):.1f},\nE[r] = {length.expected_reward(rest):.2f}",
                (rest, 0.0), xytext=(4, 52) if kind == "dr_grpo" else (-98, -66), fontsize=8, color=colour,
                textcoords="offset points", arrowprops={"arrowstyle": "->", "color": colour},
            )  # fmt: skip
    axes.axhline(0.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([0.1, 0.2, 0.4, 0.6])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("probability of stopping after a token")
    axes.set_ylabel("expected gradient (to stop: up)")
    axes.set_title("loss_type: a mean per answer lengthens it")
    axes.legend(fontsize=8)
