"""Table, learning curves and verdict of a sweep, from the episodes of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from common.environments import EpisodeLog
from common.expectation import CLIPS, Expectation, RunMeasures, judge
from common.plots import draw_curves, new_figure, save_figure
from common.stats import (
    censored_median,
    episodes_to_threshold,
    estimate,
    last_mean,
    moving_mean,
    std_after_threshold,
)
from common.tables import interval, print_table

# Episodes in a point of a learning curve. The table's 100 would lag by up to 50,000 steps of
# CartPole, half a run.
CURVE_WINDOW = 20


@dataclass(frozen=True)
class Group:
    """Settings that the runs of a group share. None: the agent has no such setting."""

    clip: float | Literal["none"] | None
    reward_scale: float
    gae_lambda: float | None
    folder: str
    curve: str  # its name within a panel of the figure
    panel: str  # the settings other than the clip range, where several are swept

    @property
    def label(self) -> str:
        """Its name within the whole sweep."""
        return f"{self.curve}, {self.panel}" if self.panel else self.curve


@dataclass(frozen=True)
class GroupRuns:
    """A group and the episodes of each of its finished runs."""

    group: Group
    logs: list[EpisodeLog]
    measures: list[RunMeasures]


def measure(group: Group, logs: list[EpisodeLog], threshold: float) -> GroupRuns:
    """A group with the measures of its runs."""
    measures = [
        RunMeasures(
            episodes_to_threshold(log.returns, threshold),
            std_after_threshold(log.returns, threshold),
            last_mean(log.returns),
        )
        for log in logs
    ]
    return GroupRuns(group, logs, measures)


def summary_row(runs: GroupRuns) -> dict[str, Any]:
    """Record of a group: settings, counts, and the measures with their intervals."""
    reached = [run.episodes_to_threshold for run in runs.measures]
    return {
        "group": runs.group.label,
        "clip": runs.group.clip,
        "reward_scale": runs.group.reward_scale,
        "gae_lambda": runs.group.gae_lambda,
        "runs": len(reached),
        "reached": sum(value is not None for value in reached),
        "episodes_to_threshold": censored_median(reached),
        "std_after": estimate([run.std_after for run in runs.measures]),
        "last_mean": estimate([run.last_mean for run in runs.measures]),
    }


def print_summary(
    console: Console, rows: Sequence[dict[str, Any]], title: str, threshold: float
) -> None:
    """The table of the groups, from the records of `summary_row`."""
    print_table(
        console,
        title,
        (
            "group",
            f"runs that reached {threshold:g}",
            f"episodes until the 100-episode mean reaches {threshold:g} (median)",
            "standard deviation of returns after that (mean)",
            "return in the last 100 episodes (mean)",
        ),
        [
            (
                row["group"],
                f"{row['reached']} of {row['runs']}",
                interval(row["episodes_to_threshold"], 0, "never"),
                interval(row["std_after"]),
                interval(row["last_mean"]),
            )
            for row in rows
        ],
        "[95% bootstrap interval over runs]; a run that never gets there counts as the latest",
    )


def curves_figure(groups: Sequence[GroupRuns], title: str, threshold: float, path: Path) -> Path:
    """Learning curves, one panel for each combination of settings other than the clip range."""
    panels = list(dict.fromkeys(runs.group.panel for runs in groups))
    columns = math.ceil(math.sqrt(len(panels)))
    n_seeds = max(len(runs.logs) for runs in groups)
    figure, axes = new_figure(-(-len(panels) // columns), columns, sharex=True, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(panels, axes.flat, strict=False):
        for index, runs in enumerate(runs for runs in groups if runs.group.panel == panel):
            curves = [
                (log.end_steps, moving_mean(log.returns, CURVE_WINDOW, partial=True))
                for log in runs.logs
            ]
            draw_curves(axis, curves, runs.group.curve, index)
        axis.axhline(threshold, color="black", linewidth=0.8, linestyle="--", label="threshold")
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("environment steps")
        axis.set_ylabel(f"return (mean of {CURVE_WINDOW} episodes)")
        axis.set_title(panel)
        axis.legend(loc="lower right")
    figure.suptitle(f"{title}: {n_seeds} seeds, mean and 95% bootstrap band", fontsize=11)
    return save_figure(figure, path)


def judge_groups(groups: Sequence[GroupRuns]) -> dict[str, Expectation]:
    """The expectation for each panel that has clip 0.1, 0.2 and 0.3."""
    found = {}
    for panel in dict.fromkeys(runs.group.panel for runs in groups):
        clips = {
            runs.group.clip: runs.measures
            for runs in groups
            if runs.group.panel == panel and isinstance(runs.group.clip, float)
        }
        if set(CLIPS) <= set(clips):
            found[panel] = judge(clips)
    return found
