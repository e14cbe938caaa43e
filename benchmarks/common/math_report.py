"""Tables and figure of the mathematics benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from common.math_arms import PARTS, Arm
from common.plots import PALETTE, draw_curves, new_figure, save_figure
from common.stats import Estimate, estimate
from common.tables import interval, number

COLUMNS = ("arm", "held-out, greedy", "last weights", "pass@1", "pass@8", "no signal", "lenient", "length",
           "CPU seconds", "to 90%, s")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """An arm over its seeds; shares in percent, of the weights chosen on the validation problems.

    ===========  ==================================================================================
    accuracy     of the most probable answers to all held-out problems
    last         the same of the weights that training ended with
    pass_1, _8   of samples
    no_signal    groups whose completions were all right or all wrong, mean over training
    lenient      samples in which the true answer occurs
    length       mean tokens of samples
    seconds      CPU seconds of training, without measuring and without the fine-tuning before
    paid_end     reward of the completions at the end of training, right_end: those that are right
    to_90        CPU seconds to 90% of the validation problems; None in the list: not reached
    runs         held-out accuracy of each seed
    ===========  ==================================================================================
    """

    name: str
    title: str
    accuracy: Estimate
    last: Estimate
    pass_1: Estimate
    pass_8: Estimate
    no_signal: Estimate
    lenient: Estimate
    length: Estimate
    seconds: Estimate
    paid_end: Estimate
    right_end: Estimate
    to_90: list[float | None]
    runs: list[float]


def make_row(name: str, title: str, results: Sequence[dict[str, Any]]) -> Row:
    """The row of an arm from the results of its seeds."""

    def over(values: Sequence[float | None], scale: float = 1.0) -> Estimate:
        return estimate([None if v is None else scale * v for v in values])

    def curve_mean(key: str) -> list[float | None]:
        found = [[p[key] for p in r["curve"] if p.get(key) is not None] for r in results]
        return [float(np.mean(f)) if f else None for f in found]

    return Row(
        name=name,
        title=title,
        accuracy=over([r["accuracy"] for r in results], 100),
        last=over([r["last_accuracy"] for r in results], 100),
        pass_1=over([r["pass_at_k"]["1"] for r in results], 100),
        pass_8=over([r["pass_at_k"].get("8") for r in results], 100),
        no_signal=over(curve_mean("no_signal"), 100),
        lenient=over([r["lenient"] for r in results], 100),
        length=over([r["length"] for r in results]),
        seconds=over([r["seconds"] for r in results]),
        paid_end=over([r["curve"][-1].get("reward") for r in results], 100),
        right_end=over([r["curve"][-1].get("pass_rate") for r in results], 100),
        to_90=[next((p["seconds"] for p in r["curve"] if p["accuracy"] >= 0.9), None) for r in results],
        runs=[r["accuracy"] for r in results],
    )


def cells(row: Row) -> list[str]:
    """A row as text."""
    reached = [t for t in row.to_90 if t is not None]
    when = f"{np.median(reached):.0f} ({len(reached)} of {len(row.to_90)})" if reached else "never"
    return [row.title, interval(row.accuracy), number(row.last.value), number(row.pass_1.value),
            number(row.pass_8.value), number(row.no_signal.value, 0), number(row.lenient.value),
            number(row.length.value, 2), number(row.seconds.value, 0), when]  # fmt: skip


def verdicts(rows: dict[str, Row], start: Row) -> list[str]:
    """What the numbers say, one sentence a line."""
    lines = [f"After SFT: {interval(start.accuracy)}% of the held-out problems, greedy."]
    main, sft = rows.get("grpo-8"), rows.get("sft")
    if main is not None:
        met = "met" if min(main.runs) >= 0.9 else "met by some seeds" if max(main.runs) >= 0.9 else "MISSED"
        lines.append(
            f"GRPO: {interval(main.accuracy)}% after {number(main.seconds.value, 0)} CPU seconds; "
            f"the target of 90% is {met} ({', '.join(f'{100 * r:.1f}' for r in main.runs)})."
        )
    if main is not None and sft is not None:
        lines.append(
            f"SFT continued on the same problems for as many passes: {interval(sft.accuracy)}% "
            f"({number(sft.seconds.value, 0)} CPU seconds)."
        )
    if "sft-all" in rows:
        lines.append(
            f"With the solutions of all train problems SFT reaches {interval(rows['sft-all'].accuracy)}%: "
            "GRPO needs no solutions but a verifier of those problems, and is no match for their solutions."
            if main is not None and (rows["sft-all"].accuracy.value or 0) > (main.accuracy.value or 0) else
            f"With the solutions of all train problems SFT reaches {interval(rows['sft-all'].accuracy)}%."
        )  # fmt: skip
    if "lenient" in rows:
        row = rows["lenient"]
        lines.append(
            f"Paid by the lenient verifier: at the end it pays {interval(row.paid_end)}% of the completions "
            f"in training, and {number(row.right_end.value)}% are right; so are greedy answers to "
            f"{interval(row.last)}% of the held-out problems."
        )
    return lines


Results = dict[str, list[dict[str, Any]]]  # of each arm, one a seed


def _curves(
    axes: Axes, arms: Sequence[Arm], results: Results, title: str, key: str = "accuracy",
    ylabel: str = "validation problems solved (%)",
) -> None:
    """Percentages over training, of each arm."""
    for index, arm in enumerate(arms):
        runs = []
        for result in results.get(arm.name, []):
            points = [p for p in result["curve"] if p.get(key) is not None]
            runs.append((np.array([p["completions"] / 1000 for p in points]),
                         100 * np.array([p[key] for p in points])))  # fmt: skip
        if any(len(x) for x, _ in runs):
            draw_curves(axes, runs, arm.title, index)
    _percent(axes, title, ylabel)


def _percent(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="completions (thousands)", ylabel=ylabel, ylim=(0, 100))
    axes.set_xlim(left=0)
    if axes.lines:
        axes.legend(fontsize=8, loc="best")


def _pass_at_k(axes: Axes, shown: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> None:
    """Mean pass@k over the seeds, for each k."""
    for index, (title, results) in enumerate(shown):
        ks = [int(k) for k in results[0]["pass_at_k"]]
        means = [100 * np.mean([r["pass_at_k"][str(k)] for r in results]) for k in ks]
        # The start in grey, so that an arm has the colour here that it has in the learning curves.
        colour = PALETTE[(index - 1) % len(PALETTE)] if index else "0.4"
        axes.plot(ks, means, marker="o", color=colour, label=title)
    ticks = [int(k) for k in shown[0][1][0]["pass_at_k"]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.set(title="One of k samples is right", xlabel="k", ylabel="held-out problems (%)", ylim=(0, 101))
    axes.legend(fontsize=8)


def _lengths(axes: Axes, arms: Sequence[Arm], results: Results) -> None:
    """Mean length of right (solid) and wrong (dotted) completions during training."""
    for index, arm in enumerate(arms):
        for key, style in (("length_right", "-"), ("length_wrong", ":")):
            runs = [[(p["completions"] / 1000, p[key]) for p in r["curve"] if p.get(key) is not None]
                    for r in results[arm.name]]  # fmt: skip
            count = min(map(len, runs))
            if count:
                mean = np.mean([run[:count] for run in runs], axis=0)
                axes.plot(mean[:, 0], mean[:, 1], style, color=PALETTE[index % len(PALETTE)],
                          label=arm.title if style == "-" else None)  # fmt: skip
    axes.set(title="Length: right solid, wrong dotted", xlabel="completions (thousands)", ylabel="tokens")
    axes.set_xlim(left=0)
    axes.legend(fontsize=8)


def draw(arms: Sequence[Arm], results: Results, start: Sequence[dict[str, Any]], path: Path) -> Path:
    """One panel a question, of those whose arms were run."""

    def part(name: str) -> list[Arm]:
        return [arm for arm in arms if arm.name in PARTS[name] and arm.name in results]

    presets = [arm for arm in arms if arm.name.startswith("preset-") and arm.name in results]
    panels: list[Any] = []
    compared = part("baselines") or part("main")
    if compared:
        panels.append(lambda a: _curves(a, compared, results, "GRPO and others"))
    groups = sorted(part("groups"), key=lambda arm: int(arm.name.split("-")[1]))
    if len(groups) > 1:
        panels.append(lambda a: _curves(a, groups, results, "Size of groups"))
    if groups:
        panels.append(lambda a: _curves(a, groups, results, "Groups without signal", "no_signal",
                                        "groups of equal rewards (%)"))
    shown = [("after SFT", start), *((arm.title, results[arm.name]) for arm in compared)]
    panels.append(lambda a: _pass_at_k(a, shown))
    controls = part("controls")
    if len(controls) > 1:
        panels.append(lambda a: _curves(a, controls, results, "What a run is given"))
    probe = part("probes")
    if len(probe) > 1:
        lenient = [arm for arm in probe if arm.name == "lenient"]
        panels.append(lambda a: _probe(a, lenient, results))
    if presets:
        panels.append(lambda a: _curves(a, presets, results, "Presets of GRPO"))
        panels.append(lambda a: _lengths(a, presets, results))
    columns = min(3, len(panels))
    figure, axes = new_figure(-(-len(panels) // columns), columns, width=5.2, height=4.0)
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel(axis)
    for axis in axes.flat[len(panels):]:
        axis.set_visible(False)
    return save_figure(figure, path)


def _probe(axes: Axes, arms: Sequence[Arm], results: Results) -> None:
    """What the lenient verifier pays, and what of it is right."""
    for index, (key, label) in enumerate((("reward", "paid by the lenient verifier"),
                                          ("pass_rate", "right"))):  # fmt: skip
        runs = []
        for result in results[arms[0].name]:
            points = [p for p in result["curve"] if p.get(key) is not None]
            runs.append((np.array([p["completions"] / 1000 for p in points]),
                         100 * np.array([p[key] for p in points])))  # fmt: skip
        draw_curves(axes, runs, label, index)
    _percent(axes, "GRPO paid by the lenient verifier", "completions in training (%)")
