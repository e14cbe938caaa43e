"""The whole RLHF pipeline, and where PPO ends when the reward is learned: beside the exact optimum.

    python benchmarks/rlhf_ppo.py --selftest
    python benchmarks/rlhf_ppo.py --train
    python benchmarks/rlhf_ppo.py --train --beta 0 0.05 0.2
    python benchmarks/rlhf_ppo.py --train --quick

SFT on samples of the n-gram reference, preferences between such samples drawn from the gold reward, a
reward model, and PPO on its score less `beta * KL(policy || reference)`, on TokenGeneration-v0's default
task ("large") and on one whose responses can all be listed ("small"). The proxy is the score of the reward
model, the gold reward what is meant; both in deviations of the reference's responses, so that a beta means
the same for both. For comparison PPO is given the gold reward itself at each beta above 0.

The four roles: the policy starts as the SFT policy, the value model as the reward model, and the reference
is by default the n-gram (`--reference sft` for the frozen SFT policy). The n-gram is what SFT imitates, and
only with it the optimum is exact: by soft value iteration for the gold reward on both tasks, and for the
learned reward by enumeration on the small one.

Measured with the defaults (three seeds, 18 minutes of CPU time in all). On the large task without the KL
the proxy rises from 0 to 2.7 and on, while gold, 3.2 at each run's best, falls to -5.2 [-13.8, -0.3]. At
beta 0.05 the proxy ends at 2.2 and gold keeps 1.7, at beta 0.5 they end at 1.6 and 1.1: less gained,
nothing lost. The optimum at beta 0.05 is worth 25 and says "kobe" over and over, which one reference
response in 5,000 holds: the reward model hardly met it, so the KL to that optimum only falls from 448 to
419 nats, and with the gold reward as PPO's own to 242, at gold 13.0 from "ul" and "sa", which are easier
to find. On the small task, where it can all be found, PPO reaches the optimum of what it is given:
KL(policy || optimum) falls from 40 to 0.84 (beta 0.05) and 1.4 to 0.055 (0.5) for the learned reward,
from 96 to 0.21 and 3.2 to 0.083 for gold. The optima of the learned reward themselves lose gold beyond
some 3 to 7 nats from the reference.

The alarm for KL and length that climb together is raised early in 27 of the 30 runs, also with the gold
reward: here the optimum is longer than the reference. It says where to look, not what is wrong. The one
for the clip fraction is never raised.

--selftest checks every stage against what is exactly true of it, in seconds. A --train that was stopped
continues. Under --out it leaves the result of every run, `summary.json`, `summary.csv`, `samples.txt`,
`training.png` and `small.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from common.files import write_json
from common.quick import apply_quick
from common.rlhf_figure import small_figure, training_figure
from common.rlhf_jobs import prepare, train
from common.rlhf_report import (
    Arm,
    Row,
    exact_optima,
    make_rows,
    print_prepared,
    print_rows,
    verdicts,
    write_samples,
)
from common.rlhf_selftest import run_selftest
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs
from common.tables import make_console, write_csv


@dataclass(frozen=True)
class Args:
    """RLHF with PPO on token tasks whose optimum is known."""

    selftest: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Check every stage on the small task; the exit status says whether all checks passed."""
    train: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run the pipeline and report."""
    beta: tuple[float, ...] = (0.0, 0.05, 0.5)
    """Weights of the KL to the reference, per deviation of the reward."""
    runs: int = 3
    """Independent runs, each with an SFT policy and a reward model of its own."""
    seed: int = 0
    """Seed of the first run; the following ones count up."""
    steps: int = 120_000
    """Tokens that PPO samples on the large task; a third of it on the small one."""
    pairs: int = 8_000
    """Preference pairs for the reward model. Fewer make it weaker."""
    reference: str = "ngram"
    """Policy of the KL: ngram, whose optimum is exact, or sft, a frozen copy of the SFT policy."""
    kl_in: str = "reward"
    """Where the KL is: reward (k1 of each token) or loss (k2; advantages are then not normalised)."""
    learning_rate: float = 1e-3
    """PPO's first step size; it falls linearly to 0."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/rlhf_ppo")
    """Folder for the runs, tables and figures."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Two short runs at beta 0 and 0.5, in results/rlhf_ppo_quick."""


QUICK: dict[str, Any] = {
    "beta": (0.0, 0.5), "runs": 2, "steps": 15_000, "pairs": 2_000, "out": Path("results/rlhf_ppo_quick"),
}  # fmt: skip

# Settings of each size: the stages before PPO, and PPO's rollouts and minibatches in whole responses.
STAGES: dict[str, dict[str, Any]] = {
    "large": {
        "policy": {"n_embd": 64},
        "sft_samples": 20_000,
        "sft": {"learning_rate": "lin_0.003", "n_epochs": 2},
        "reward_model": {"learning_rate": "lin_0.003", "n_epochs": 2},
    },
    "small": {
        "policy": {"n_embd": 32},
        "sft_samples": 10_000,
        "sft": {"learning_rate": "lin_0.005", "n_epochs": 2},
        "reward_model": {"learning_rate": "lin_0.01", "n_epochs": 4},
    },
}
ROLLOUT = {"n_envs": 64, "batch_size": 32, "n_epochs": 4}
EVALUATIONS = 25


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    if args.selftest == args.train:
        raise ValueError("one of --selftest and --train is needed, and only one")
    for name in ("runs", "workers", "pairs", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least 1")
    if not args.beta or min(args.beta) < 0 or not np.isfinite(args.beta).all():
        raise ValueError(f"--beta {args.beta} is not allowed: one or more finite numbers >= 0")
    if not args.learning_rate > 0:
        raise ValueError(f"--learning-rate is {args.learning_rate}, must be above 0")
    for name, value, allowed in (
        ("reference", args.reference, ("ngram", "sft")), ("kl-in", args.kl_in, ("reward", "loss"))
    ):  # fmt: skip
        if value not in allowed:
            raise ValueError(f"--{name} is {value!r}; allowed: {', '.join(allowed)}")


def prepare_jobs(args: Args) -> list[Job]:
    """One job for each size and seed: what all arms start from."""
    return [
        Job(
            f"{size}_prepare/seed-{seed}",
            {"size": size, "seed": seed, "pairs": args.pairs, **stages},
        )
        for size, stages in STAGES.items()
        for seed in range(args.seed, args.seed + args.runs)
    ]


def arms(args: Args) -> list[Arm]:
    """The learned reward at each beta; the gold reward where its optimum is one policy, above 0."""
    return [
        Arm(size, reward, beta)
        for size in STAGES
        for reward in ("learned", "gold")
        for beta in args.beta
        if reward == "learned" or beta > 0
    ]


def train_jobs(args: Args, prepared: Sequence[Outcome]) -> list[Job]:
    """One job for each arm and each seed whose stages before PPO are there."""
    ppo: dict[str, Any] = {**ROLLOUT, "learning_rate": f"lin_{args.learning_rate:g}", "kl_in": args.kl_in}
    if args.kl_in == "loss":
        ppo["normalize_advantage"] = False
    return [
        Job(
            f"{arm.size}_{arm.reward}_beta-{arm.beta:g}/seed-{ready.job.config['seed']}",
            {
                "size": arm.size,
                "reward": arm.reward,
                "beta": arm.beta,
                "seed": ready.job.config["seed"],
                "steps": args.steps if arm.size == "large" else args.steps // 3,
                "evaluations": EVALUATIONS,
                "reference": args.reference,
                "ppo": ppo,
                "prepared": ready.job.name,
                "prepare": ready.job.config,
            },
        )
        for arm in arms(args)
        for ready in prepared
        if ready.result is not None and ready.job.config["size"] == arm.size
    ]


def selftest(console: Console) -> int:
    """Run the self-test; the exit status."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    failures = run_selftest(say)
    say(f"{len(failures)} checks failed: " + "; ".join(failures) if failures else "all checks passed")
    return 1 if failures else 0


def report(args: Args, console: Console, prepared: Sequence[Outcome], outcomes: Sequence[Outcome]) -> None:
    """Tables, verdicts, alarms, figures and files of the runs that succeeded."""
    rows: list[Row] = make_rows(outcomes)
    optima = exact_optima([row.arm for row in rows])
    print_prepared(console, prepared)
    print_rows(console, rows, optima)
    lines = verdicts(rows, optima)
    runs = [outcome for outcome in outcomes if outcome.result is not None]
    alarms = [f"{run.job.name}: {line}" for run in runs for line in run.result["alarms"]]  # type: ignore[index]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in alarms:
        console.print(f"ALARM {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    files = [
        training_figure(runs, optima, args.out / "training.png"),
        small_figure(runs, args.out, args.out / "small.png"),
        write_samples(runs, args.out / "samples.txt"),
    ]
    write_json(
        args.out / "summary.json",
        {
            "args": args,
            "prepared": [p.job.config | {"result": p.result} for p in prepared],
            "rows": rows,
            "optima": [{"arm": arm, **values} for arm, values in optima.items()],
            "verdicts": lines,
            "alarms": alarms,
            "runs": [run.job.config | (run.result or {}) for run in runs],
        },
    )
    write_csv(args.out / "summary.csv", [vars(row.arm) | row.measures for row in rows])
    for path in (*files, args.out / "summary.json", args.out / "summary.csv"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Run the benchmark and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    if args.selftest:
        return selftest(console)
    try:
        prepared = run_jobs(
            prepare, prepare_jobs(args), args.out, args.workers, "SFT and reward models", console
        )
        outcomes = run_jobs(train, train_jobs(args, prepared), args.out, args.workers, "PPO runs", console)
    except KeyboardInterrupt:
        console.print("stopped; finished runs are kept, and the same command continues")
        return 130
    if any(outcome.result is not None for outcome in outcomes):
        report(args, console, prepared, outcomes)
    return 1 if report_failures([*prepared, *outcomes], console) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
