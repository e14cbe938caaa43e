"""Why clipping exists: final return and collapsed runs over a range of learning rates.

Three methods see the same number of environment steps: plain policy gradient (one gradient step
for 8 whole episodes, so there is no ratio to clip), and PPO's 20 epochs on each rollout without and
with the clipped ratio. Reusing a rollout is what makes PPO fast and what, unclipped, carries the
policy far from the one that was sampled. Whether a run has collapsed is defined in
`common.stats.has_collapsed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from common.control import ZOO_N_ENVS, agent_config
from common.environments import EpisodeLog, random_returns
from common.plots import MARKERS, PALETTE, new_figure, save_figure
from common.runner import Job, Outcome
from common.stats import estimate, has_collapsed, last_mean
from common.tables import interval, print_table

# Agent, number of environments, config. The policy gradient takes 8 whole episodes a step from one
# environment: from several at once, those that finish first would go on for nothing.
METHODS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "policy gradient": (
        "reinforce",
        1,
        {"n_episodes": 8, "gamma": 0.98, "baseline": "batch_mean", "normalize_advantage": True},
    ),
    "PPO, no clipping": ("ppo", ZOO_N_ENVS, {"clip_range": None}),
    "PPO, clip 0.2": ("ppo", ZOO_N_ENVS, {"clip_range": 0.2}),
}
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def collapse_jobs(env: str, steps: int, seeds: Sequence[int]) -> list[Job]:
    """A run for each method, constant learning rate and seed."""
    return [
        Job(
            f"collapse/{method.replace(', ', '-').replace(' ', '_')}/rate-{rate:g}/seed-{seed}",
            {
                "env": env,
                "agent": agent,
                "n_envs": n_envs,
                "reward_scale": 1.0,
                "steps": steps,
                "seed": seed,
                "agent_config": agent_config(agent, learning_rate=rate, **chosen),
                "method": method,
            },
        )
        for method, (agent, n_envs, chosen) in METHODS.items()
        for rate in RATES
        for seed in seeds
    ]


def is_collapse_job(job: Job) -> bool:
    """Whether a job is one of `collapse_jobs`."""
    return "method" in job.config


def collapse_rows(env: str, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A record for each method and rate: final mean return, and how many of the runs collapsed."""
    level = random_returns(env) if outcomes else np.empty(0)
    cells: dict[tuple[str, float], list[np.ndarray]] = {}
    for outcome in outcomes:
        config = outcome.job.config
        returns = EpisodeLog.load(outcome.folder / "episodes.csv").returns
        key = (config["method"], config["agent_config"]["learning_rate"])
        cells.setdefault(key, []).append(returns)
    return [
        {
            "method": method,
            "learning_rate": rate,
            "runs": len(runs),
            "collapsed": sum(has_collapsed(returns, level) for returns in runs),
            "last_mean": estimate([last_mean(returns) for returns in runs]),
            "last_means": [last_mean(returns) for returns in runs],
        }
        for (method, rate), runs in cells.items()
    ]


def print_collapse(console: Console, rows: Sequence[dict[str, Any]], env: str, steps: int) -> None:
    """The table of the records of `collapse_rows`."""
    print_table(
        console,
        f"Why clipping exists: {env}, {steps:,} steps, constant learning rates",
        ("method", "learning rate", "return in the last 100 episodes (mean)", "collapsed runs"),
        [
            (
                row["method"],
                f"{row['learning_rate']:g}",
                interval(row["last_mean"]),
                f"{row['collapsed']} of {row['runs']}",
            )
            for row in rows
        ],
        "collapsed: ended below half of its best gain over random play, or below random play",
    )


def collapse_figure(rows: Sequence[dict[str, Any]], env: str, steps: int, path: Path) -> Path:
    """Draw the records of `collapse_rows`: returns above, collapsed runs below."""
    figure, axes = new_figure(2, 1, height=3.0, sharex=True, height_ratios=(2, 1))
    (top,), (bottom,) = axes
    rates = sorted({row["learning_rate"] for row in rows})
    n_runs = max(row["runs"] for row in rows)
    for index, method in enumerate(METHODS):
        own = [row for row in rows if row["method"] == method]
        if not own:
            continue
        colour, marker = PALETTE[index], MARKERS[index]
        # Positions, not rates: methods side by side at each rate, or their points hide each other.
        x = np.array([rates.index(row["learning_rate"]) for row in own]) + (index - 1) * 0.2
        for position, row in zip(x, own, strict=True):
            values = np.array(row["last_means"], dtype=float)  # no episode: None, then NaN
            top.plot([position] * len(values), values, ".", color=colour, alpha=0.45)
            ends = row["last_mean"]
            if ends.low is not None:
                top.plot([position] * 2, [ends.low, ends.high], color=colour, linewidth=1.4)
        means = np.array([row["last_mean"].value for row in own], dtype=float)
        top.plot(x, means, marker=marker, color=colour, label=method, linewidth=1.2)
        bars = bottom.bar(x, [row["collapsed"] for row in own], width=0.18, color=colour)
        bottom.bar_label(bars, fontsize=8)
    top.set_ylabel("return (mean of the last 100 episodes)")
    top.set_title(f"{env}, {steps:,} steps, {n_runs} seeds, 95% bootstrap intervals")
    top.legend(ncols=len(METHODS), loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=9)
    bottom.set_ylabel(f"collapsed runs of {n_runs}")
    bottom.set_ylim(0, n_runs * 1.15)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    bottom.set_xlabel("learning rate (constant)")
    return save_figure(figure, path)
