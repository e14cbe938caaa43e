"""The figures of the RLHF benchmark: curves over training, and the small task against its exact optima."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from common.plots import MARKERS, PALETTE, draw_curves, new_figure, save_figure
from common.rlhf_jobs import load_prepared
from common.rlhf_measure import Listed, exact_measures, list_all
from common.rlhf_pipeline import small_task
from common.rlhf_report import Arm, arm_of
from common.runner import Outcome
from common.stats import moving_mean

PANELS = (
    ("curve", "proxy", "proxy reward: the score of the reward model"),
    ("curve", "gold", "gold reward: what is meant"),
    ("curve", "kl", "KL(policy || reference), nats"),
    ("curve", "kl_opt", "KL to the gold optimum, of the reference's"),
    ("curve", "length", "length, tokens"),
    ("curve", "entropy", "entropy of the next token, nats"),
    ("updates", "clip_fraction", "clip fraction"),
    ("updates", "value_loss", "squared error of the value"),
)
SMOOTHED = 20  # updates in the moving mean of their curves
BETAS = np.geomspace(0.003, 10.0, 60)  # of the exact curves on the small task


def series(run: Outcome, source: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a measure of one run; empty where it is not defined."""
    assert run.result is not None
    points = [(p["step"], p[name]) for p in run.result[source] if p.get(name) is not None]
    x, y = (np.array(column, dtype=float) for column in zip(*points, strict=True)) if points else (
        np.zeros(0), np.zeros(0))  # fmt: skip
    if source == "updates":
        y = moving_mean(y, SMOOTHED, partial=True)
    return x, y


def logarithmic(panel: Axes) -> None:
    """A logarithmic y axis with plain numbers at 1 and 3 of each decade: 0.3, not 3 x 10^-1."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())


def by_arm(runs: Sequence[Outcome], size: str) -> dict[Arm, list[Outcome]]:
    """Runs of one size, the learned reward first, beta rising."""
    groups: dict[Arm, list[Outcome]] = {}
    for run in runs:
        if arm_of(run).size == size:
            groups.setdefault(arm_of(run), []).append(run)
    return dict(sorted(groups.items(), key=lambda item: (item[0].reward == "gold", item[0].beta)))


def training_figure(
    runs: Sequence[Outcome], optima: Mapping[Arm, Mapping[str, float | None]], path: Path
) -> Path:
    """Every measure over training on the large task, with the exact optimum of the gold reward as lines."""
    groups = by_arm(runs, "large")
    figure, axes = new_figure(2, 4, width=4.0, height=3.4, sharex=True)
    for panel, (source, name, title) in zip(axes.flat, PANELS, strict=True):
        for index, (arm, members) in enumerate(groups.items()):
            label = f"{arm.reward} reward, beta {arm.beta:g}"
            curves = [series(run, source, name) for run in members]
            if name == "kl_opt" and arm.beta > 0:
                whole = optima[arm]["reference_kl_opt"]
                assert whole is not None
                curves = [(x, y / whole) for x, y in curves]
            draw_curves(panel, curves, label, index)
            exact = optima[arm].get(name)
            if exact is not None and arm.reward == "learned":
                panel.axhline(exact, color=PALETTE[index], linestyle="--", linewidth=1.2)
        if name == "value_loss":
            logarithmic(panel)
        if name == "kl_opt":
            panel.axhline(0.0, color="black", linestyle="--", linewidth=1.2)
        panel.set_title(title)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
    for panel in axes[1]:
        panel.set_xlabel("tokens sampled")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    handles.append(axes[0, 0].plot([], [], color="black", linestyle="--", linewidth=1.2)[0])
    labels.append("exact optimum of the gold reward")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    n_runs = max(map(len, groups.values()), default=0)
    figure.suptitle(
        f"PPO from the SFT policy on TokenGeneration-v0: mean of {n_runs} runs with 95% bootstrap interval; "
        "rewards in deviations of the reference"
    )
    return save_figure(figure, path)


def small_figure(runs: Sequence[Outcome], out: Path, path: Path) -> Path:
    """The small task, all exact: rewards against KL beside both optima, and the distance over training."""
    groups = by_arm(runs, "small")
    learned = {arm: members for arm, members in groups.items() if arm.reward == "learned"}
    figure, axes = new_figure(1, 3, width=5.0, height=4.2)
    first = next(iter(learned.values()))
    for member in first:
        listed = _listed(member, out)
        curves = {name: _frontier(listed, getattr(listed, name)) for name in ("proxy", "gold")}
        for panel, name in zip(axes[0], ("proxy", "gold"), strict=False):
            for style, optimised in (("--", "gold"), ("-", "proxy")):
                kl, values = curves[optimised]["kl"], curves[optimised][name]
                shown = {"proxy": "optima of the learned reward", "gold": "optima of the gold reward"}
                label = shown[optimised] if member is first[0] else None
                panel.plot(kl, values, style, color="black", linewidth=1.0, alpha=0.6, label=label, zorder=1)
    for index, (arm, members) in enumerate(groups.items()):
        last = [m.result["curve"][-1] for m in members if m.result is not None]
        for panel, name in zip(axes[0], ("proxy", "gold"), strict=False):
            panel.scatter(
                [p["kl"] for p in last], [p[name] for p in last], color=PALETTE[index], s=36, zorder=3,
                marker=MARKERS[index], edgecolors="black", linewidths=0.5,
                label=f"PPO, {arm.reward} reward, beta {arm.beta:g}",
            )  # fmt: skip
        name = "kl_learned" if arm.reward == "learned" else "kl_opt"
        draw_curves(
            axes[0, 2], [series(m, "curve", name) for m in members], f"{arm.reward}, beta {arm.beta:g}", index
        )
    for panel, title in zip(axes[0], ("proxy", "gold"), strict=False):
        panel.set_title(f"{title} reward")
        panel.set_xlabel("KL(policy || reference), nats")
        panel.set_ylabel("deviations of the reference")
    logarithmic(axes[0, 2])
    axes[0, 2].set_title("KL(policy || optimum of the reward it is given)")
    axes[0, 2].set_xlabel("tokens sampled")
    axes[0, 2].set_ylabel("nats")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(
        f"The small task, exact by enumeration: {len(first)} runs, each with its own reward model"
    )
    return save_figure(figure, path)


def _listed(run: Outcome, out: Path) -> Listed:
    """All responses with the rewards of the reward model of a run."""
    config: dict[str, Any] = run.job.config
    task = small_task()
    return list_all(task, load_prepared(task, config["prepare"], out / config["prepared"])[1])


def _frontier(listed: Listed, reward: np.ndarray) -> dict[str, np.ndarray]:
    """Exact measures of the optima of a reward over `BETAS`."""
    points = [exact_measures(listed, listed.optimum(reward, beta)[1], 0.0) for beta in BETAS]
    return {name: np.array([p[name] for p in points], dtype=float) for name in ("kl", "proxy", "gold")}
