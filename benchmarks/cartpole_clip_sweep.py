"""PPO's clip range on CartPole-v1: how fast, how stable, how good at 0.1, 0.2 and 0.3.

    python benchmarks/cartpole_clip_sweep.py
    python benchmarks/cartpole_clip_sweep.py --quick
    python benchmarks/cartpole_clip_sweep.py --agent sb3:PPO --clip 0.1 0.2 0.3
    python benchmarks/cartpole_clip_sweep.py --agent my_package.my_module:MyAgent --runs 10

The clip range stays constant within a run; all other settings are RL Baselines3 Zoo's. The command
continues a sweep that was stopped. Under --out it leaves the returns of every episode of every run
(`GROUP/seed-N/episodes.csv`), `summary.json`, `summary.csv` and the figures.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import tyro
from rich.console import Console

import agents
from common.clip_report import (
    Group,
    curves_figure,
    judge_groups,
    measure,
    print_summary,
    summary_row,
)
from common.collapse import (
    collapse_figure,
    collapse_jobs,
    collapse_rows,
    is_collapse_job,
    print_collapse,
)
from common.control import agent_config, default_n_envs, train
from common.environments import EpisodeLog
from common.expectation import CLIPS
from common.files import write_json
from common.quick import apply_quick
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs
from common.tables import make_console, write_csv

SEED_SPACING = 1_000  # run i has the seeds from base + 1000 i on, one for each sub-environment


@dataclass(frozen=True)
class Args:
    """Sweep PPO's clip range on a control task and judge what is said of it."""

    agent: str = "ppo"
    """An agent as agents.make takes it: ppo, reinforce, sb3:PPO, package.module:Class. One that
    has no field clip_range is one group; one without all the fields of the Zoo's settings runs on
    its own defaults."""
    clip: tuple[float | Literal["none"], ...] = CLIPS
    """Clip ranges; none is the unclipped ratio."""
    runs: int = 5
    """Independent runs of each group."""
    env: str = "CartPole-v1"
    """Environment id."""
    steps: int = 100_000
    """Environment steps of a run."""
    reward_scale: tuple[float, ...] = (1.0,)
    """Factors on the reward that the agent sees; several make a grid. Results are unscaled."""
    gae_lambda: tuple[float, ...] = (0.8,)
    """Lambdas of generalised advantage estimation; several make a grid."""
    n_envs: int | None = None
    """Environments stepped together; 1 is a plain Env. By default 8 for our agents and SB3's, 1
    for a custom class."""
    threshold: float = 450.0
    """Return that the mean of 100 episodes is to reach."""
    seed: int = 0
    """Seed of the first run."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/cartpole_clip_sweep")
    """Folder for the runs, tables and figures."""
    collapse: bool = True
    """Also run and draw the second figure: policy gradient, unclipped and clipped PPO over
    learning rates. With --agent ppo only."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A taste in seconds: of the options left at their defaults, --clip becomes 0.2, --runs 2,
    --out results/cartpole_clip_sweep_quick, and --no-collapse."""


QUICK: dict[str, Any] = {
    "clip": (0.2,),
    "runs": 2,
    "out": Path("results/cartpole_clip_sweep_quick"),
    "collapse": False,
}


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name in ("runs", "steps", "workers", "n_envs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, must be at least 1")
    for name in ("clip", "reward_scale", "gae_lambda"):
        values = getattr(args, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"--{name.replace('_', '-')} needs one or more different values")
    for clip in args.clip:
        if clip != "none" and not clip > 0:
            raise ValueError(f"--clip {clip} is not allowed: a positive number, or none")
    for value in args.gae_lambda:
        if not 0 <= value <= 1:
            raise ValueError(f"--gae-lambda {value} is not allowed: from 0 to 1")
    gym.spec(args.env)


def make_groups(args: Args) -> list[Group]:
    """The full grid over those axes that the agent has.

    Raises ValueError where --gae-lambda was asked of an agent without that field.
    """
    fields = agents.config_fields(args.agent)
    clips: Sequence[Any] = args.clip if "clip_range" in fields else (None,)
    lambdas: Sequence[Any] = args.gae_lambda if "gae_lambda" in fields else (None,)
    if lambdas == (None,) and args.gae_lambda != Args.gae_lambda:
        raise ValueError(f"--gae-lambda: agent {args.agent} has no field gae_lambda")
    groups = []
    for scale, lam, clip in itertools.product(args.reward_scale, lambdas, clips):
        parts = [args.agent.replace(":", "-")]
        parts += [f"clip-{clip}"] if clip is not None else []
        parts += [f"lambda-{lam:g}"] if lam is not None else []
        parts += [f"scale-{scale:g}"]
        panel = [f"reward x {scale:g}"] if len(args.reward_scale) > 1 else []
        panel += [f"lambda {lam:g}"] if len(lambdas) > 1 else []
        curve = f"clip {clip}" if clip is not None else args.agent
        groups.append(Group(clip, scale, lam, "_".join(parts), curve, ", ".join(panel)))
    return groups


def make_jobs(args: Args, group: Group) -> list[Job]:
    """One run of the group for each seed."""
    chosen: dict[str, Any] = {}
    if group.clip is not None:
        chosen["clip_range"] = None if group.clip == "none" else group.clip
    if group.gae_lambda is not None:
        chosen["gae_lambda"] = group.gae_lambda
    config = {
        "env": args.env,
        "agent": args.agent,
        "n_envs": args.n_envs or default_n_envs(args.agent),
        "reward_scale": group.reward_scale,
        "steps": args.steps,
        "agent_config": agent_config(args.agent, **chosen),
    }
    return [
        Job(f"{group.folder}/seed-{seed}", config | {"seed": seed}) for seed in make_seeds(args)
    ]


def make_seeds(args: Args) -> list[int]:
    """The seed of each run."""
    return [args.seed + SEED_SPACING * run for run in range(args.runs)]


def report(
    console: Console, args: Args, groups: Sequence[Group], outcomes: Sequence[Outcome]
) -> None:
    """Print the tables, draw the figures and write the summaries of the runs that succeeded."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    logs: dict[str, list[EpisodeLog]] = {group.folder: [] for group in groups}
    for outcome in done:
        if (folder := str(Path(outcome.job.name).parent)) in logs:
            logs[folder].append(EpisodeLog.load(outcome.folder / "episodes.csv"))
    results = [measure(group, logs[group.folder], args.threshold) for group in groups]

    rows = [summary_row(runs) for runs in results]
    title = f"{args.agent} on {args.env}"
    print_summary(console, rows, f"{title}, {args.steps:,} steps", args.threshold)
    expectations = judge_groups(results)
    for panel, expectation in expectations.items():
        line = f"{panel}: {expectation.line}" if panel else expectation.line
        console.print(line, highlight=False, soft_wrap=True)
    figures = [curves_figure(results, title, args.threshold, args.out / "learning_curves.png")]
    collapse = collapse_rows(args.env, [each for each in done if is_collapse_job(each.job)])
    if collapse:
        print_collapse(console, collapse, args.env, args.steps)
        figures.append(collapse_figure(collapse, args.env, args.steps, args.out / "collapse.png"))
    write_json(
        args.out / "summary.json",
        {
            "args": args,
            "groups": rows,
            "runs": {runs.group.folder: runs.measures for runs in results},
            "expectation": expectations,
            "collapse": collapse,
            "figures": figures,
        },
    )
    write_csv(args.out / "summary.csv", rows)
    for path in [*figures, args.out / "summary.json", args.out / "summary.csv"]:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Run the sweep and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
        groups = make_groups(args)
    except (ValueError, gym.error.Error) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2

    jobs = [job for group in groups for job in make_jobs(args, group)]
    if args.collapse and args.agent == "ppo":
        jobs += collapse_jobs(args.env, args.steps, make_seeds(args))
    try:
        outcomes = run_jobs(train, jobs, args.out, args.workers, console=console)
    except KeyboardInterrupt:
        console.print("stopped; finished runs are kept, and the same command continues")
        return 130
    if any(outcome.error is None for outcome in outcomes):
        report(console, args, groups, outcomes)
    return 1 if report_failures(outcomes, console) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
