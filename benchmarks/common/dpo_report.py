"""Tables, figure and sentences of `dpo_vs_ppo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console

from common.plots import MARKERS, PALETTE, new_figure, save_figure
from common.rlhf_pipeline import gold_task
from common.stats import Estimate, estimate
from common.tables import interval, number, print_table
from llmgym.token_solution import TokenSolution

ARMS = ("SFT", "DPO", "PPO")
MEASURES = ("accuracy", "gold", "kl", "objective", "kl_opt", "length")
ENOUGH_RUNS = 5  # the bootstrap interval of fewer means little
COSTS = ("wall_seconds", "cpu_seconds", "peak_mib")


@dataclass(frozen=True)
class Setting:
    """A setting of the grid, with the KL to the optimum of each of its runs."""

    arm: str
    learning_rate: float
    n_epochs: int
    kl_opt: list[float]

    @property
    def mean(self) -> float:
        """Mean distance of its runs."""
        return float(np.mean(self.kl_opt))


@dataclass(frozen=True)
class Tuning:
    """What a grid of one method says: the mean distance of its best, middle and worst setting."""

    arm: str
    settings: list[Setting]
    chosen: Setting
    best: float
    median: float
    worst: float
    deviation: float


@dataclass(frozen=True)
class Row:
    """One method at its chosen setting: means over the runs with intervals."""

    arm: str
    runs: int
    accuracy: Estimate
    gold: Estimate
    kl: Estimate
    objective: Estimate
    kl_opt: Estimate
    length: Estimate
    wall_seconds: Estimate
    cpu_seconds: Estimate
    peak_mib: Estimate


@dataclass(frozen=True)
class Exact:
    """The optimum at a beta."""

    gold: float
    kl: float
    objective: float
    length: float


def exact_optimum(beta: float) -> Exact:
    """Of the gold reward with the n-gram as reference."""
    solution = TokenSolution(gold_task())
    value = solution.evaluate(solution.optimal_policy(beta), beta)
    return Exact(value.reward, value.kl_to_reference, value.objective, value.response_length)


def tune(settings: Sequence[Setting]) -> Tuning:
    """The spread over the settings of one method; chosen is the one of the least mean distance."""
    means = np.array([setting.mean for setting in settings])
    return Tuning(
        settings[0].arm, list(settings), settings[int(means.argmin())], float(means.min()),
        float(np.median(means)), float(means.max()), float(means.std()),
    )  # fmt: skip


def make_row(arm: str, results: Sequence[dict[str, Any]]) -> Row:
    """The measures and costs of runs of one method."""
    measures = {name: estimate([result[name] for result in results]) for name in MEASURES}
    costs = {name: estimate([result["cost"][name] for result in results]) for name in COSTS}
    return Row(arm, len(results), **measures, **costs)


def add_costs(model: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """Of PPO: its reward model first, then itself. Seconds add up, of the peaks the higher one counts."""
    peaks = [cost["peak_mib"] for cost in (model, policy) if cost["peak_mib"] is not None]
    seconds = {name: model[name] + policy[name] for name in ("wall_seconds", "cpu_seconds")}
    return seconds | {"peak_mib": max(peaks) if peaks else None}


def difference(results: dict[str, list[dict[str, Any]]], name: str) -> Estimate:
    """A measure of DPO less that of PPO, in pairs of the same start and preferences."""
    pairs = zip(results["DPO"], results["PPO"], strict=True)
    return estimate([dpo[name] - ppo[name] for dpo, ppo in pairs])


def print_rows(console: Console, beta: float, rows: Sequence[Row], exact: Exact) -> None:
    """The methods beside each other."""
    table = [
        [
            row.arm, interval(row.accuracy, 3), interval(row.gold, 2), number(row.kl.value, 2),
            number(row.objective.value, 2), interval(row.kl_opt, 2), number(row.wall_seconds.value, 0),
            number(row.cpu_seconds.value, 0), number(row.peak_mib.value, 0),
        ]
        for row in rows
    ]  # fmt: skip
    table.append(["optimum", "-", number(exact.gold, 2), number(exact.kl, 2), number(exact.objective, 2),
                  "0", "-", "-", "-"])  # fmt: skip
    print_table(
        console,
        f"Token generation, beta {beta:g}, {rows[0].runs} seeds: mean [95% interval]",
        ["", "accuracy", "gold", "KL ref.", "objective", "KL to optimum", "wall s", "CPU s", "MiB"],
        table,
        caption="accuracy: of the implicit reward log pi - log ref on held-out preferences. Rewards in "
        "deviations of the reference's, KL in nats of whole responses, objective = gold - beta KL. "
        "Seconds and memory of the method alone, PPO with its reward model; DPO and PPO start from the SFT "
        "policy. MiB: growth of the resident process to its peak, mostly temporary buffers.",
    )


def print_tuning(console: Console, tunings: Sequence[Tuning]) -> None:
    """Every setting of the grids, and their spread."""
    table = []
    for tuning in tunings:
        for setting in sorted(tuning.settings, key=lambda each: each.mean):
            mark = "  chosen" if setting is tuning.chosen else ""
            runs = ", ".join(f"{kl:.3f}" for kl in setting.kl_opt)
            table.append([f"{setting.arm}{mark}", f"{setting.learning_rate:g}", str(setting.n_epochs),
                          number(setting.mean, 3), runs])  # fmt: skip
    print_table(
        console, "The grid: KL to the optimum by setting, on other seeds than those above",
        ["", "learning rate", "epochs", "mean", "runs"], table,
        caption="epochs: of DPO passes over the preferences, of PPO passes over each rollout",
    )  # fmt: skip


def verdicts(
    tunings: Sequence[Tuning], results: dict[str, list[dict[str, Any]]], rows: Sequence[Row]
) -> list[str]:
    """What the numbers say, one sentence a line."""
    kl_opt = difference(results, "kl_opt")
    if kl_opt.low is None or kl_opt.high is None or kl_opt.n < ENOUGH_RUNS:
        said = f"too few runs to tell ({kl_opt.n})"
    elif kl_opt.low > 0 or kl_opt.high < 0:
        said = f"{'PPO' if kl_opt.low > 0 else 'DPO'} is nearer to the optimum"
    else:
        said = "not told apart"
    lines = [f"KL to the optimum, DPO less PPO on the same preferences: {interval(kl_opt, 3)}: {said}."]
    lines += [
        f"{t.arm}'s grid of {len(t.settings)} settings: best {t.best:.3f}, median {t.median:.3f}, worst "
        f"{t.worst:.3f} (deviation {t.deviation:.3f})."
        for t in tunings
    ]
    cpu = {row.arm: row.cpu_seconds.value for row in rows}
    dpo, ppo = cpu["DPO"], cpu["PPO"]
    if dpo and ppo:
        lines.append(f"PPO with its reward model took {ppo / dpo:.1f} times the CPU seconds of DPO.")
    return lines


def draw(
    results: dict[str, list[dict[str, Any]]], tunings: Sequence[Tuning], beta: float, path: Path
) -> Path:
    """Where each run ended beside the exact frontier, and the distance by setting of the grid."""
    figure, axes = new_figure(1, 2, width=5.6, height=4.2)
    _draw_frontier(axes[0, 0], results, beta)
    _draw_grid(axes[0, 1], results, tunings)
    figure.suptitle(f"DPO and PPO from the same preferences and the same SFT policy, beta {beta:g}")
    return save_figure(figure, path)


def _draw_frontier(axes: Axes, results: dict[str, list[dict[str, Any]]], beta: float) -> None:
    solution = TokenSolution(gold_task())
    furthest = max(run["kl"] for runs in results.values() for run in runs)
    curve = []
    for each in np.geomspace(0.4 * beta, 20.0 * beta, 40):
        value = solution.evaluate(solution.optimal_policy(float(each)), float(each))
        curve.append((value.kl_to_reference, value.reward))
    exact = exact_optimum(beta)
    shown = [(kl, gold) for kl, gold in curve if kl <= 1.25 * max(exact.kl, furthest)]
    axes.plot(*zip(*shown, strict=True), color="black", zorder=1, label="exact optima of all betas")
    axes.plot(exact.kl, exact.gold, "*", color="black", markersize=13, label=f"optimum at beta {beta:g}")
    for index, arm in enumerate(ARMS):
        x, y = ([run[name] for run in results[arm]] for name in ("kl", "gold"))
        axes.scatter(x, y, s=40, color=PALETTE[index], marker=MARKERS[index], alpha=0.7, linewidths=0,
                     zorder=3, label=f"{arm}, {len(x)} seeds")  # fmt: skip
    axes.set_xlabel("KL(policy || reference), nats")
    axes.set_ylabel("gold reward, deviations")
    axes.set_title("each seed at the chosen setting")
    axes.legend(fontsize=8, loc="upper left")


def _draw_grid(axes: Axes, results: dict[str, list[dict[str, Any]]], tunings: Sequence[Tuning]) -> None:
    labels: list[str] = []
    for tuning in tunings:
        index = ARMS.index(tuning.arm)
        for setting in sorted(tuning.settings, key=lambda each: each.mean):
            place = len(labels)
            axes.plot([place] * len(setting.kl_opt), setting.kl_opt, MARKERS[index], color=PALETTE[index],
                      alpha=0.5, markersize=5, linestyle="none")  # fmt: skip
            axes.plot([place - 0.3, place + 0.3], [setting.mean] * 2, color=PALETTE[index],
                      label=tuning.arm if setting is tuning.chosen else None)  # fmt: skip
            labels.append(f"{tuning.arm} {setting.learning_rate:g}, {setting.n_epochs}")
    start = float(np.mean([run["kl_opt"] for run in results["SFT"]]))
    axes.axhline(start, color=PALETTE[0], linestyle=":", label="SFT, the start")
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
    axes.set_ylim(0.0, 1.25 * axes.get_ylim()[1])  # room for the legend
    axes.set_ylabel("KL(policy || optimum), nats")
    axes.set_title("each setting of the grid: learning rate, epochs")
    axes.legend(fontsize=8, loc="upper left", ncols=3)
