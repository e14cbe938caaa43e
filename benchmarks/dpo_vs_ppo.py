"""DPO or PPO: from the same preferences and the same start, which comes nearer to the exact optimum?

    python benchmarks/dpo_vs_ppo.py
    python benchmarks/dpo_vs_ppo.py --quick
    python benchmarks/dpo_vs_ppo.py --beta 1.5 --pairs 50000

    SFT policy --+--> DPO on the preferences
                 +--> reward model of the same preferences --> PPO

The task is the default one of TokenGeneration-v0. A preference between two responses of the n-gram
reference is drawn from their gold rewards, P(1 beats 2) = sigmoid(gold 1 - gold 2). That fixes what beta
means: rewards are counted in deviations of the reference's (0.38 of the task's own unit, so 0.8 is 0.3
there), and both DPO at beta and PPO at beta on the true reward have the optimum ref * exp(gold / beta).
PPO's reward model keeps the unit in which it explains the preferences; a model that knows less scores within
a narrower range, where normalising to deviation 1 would have been a smaller beta.
The reference of both is the n-gram itself (PPO reads its log-probs from the environment, DPO is given
them), because its optimum is exact; the SFT policy is where both begin, and a KL of 0.1 from it.

Tuning effort is measured by a small grid of each method, as many settings of each, two seeds a setting.
The setting nearest to the optimum is then run on other seeds, so that no figure below was chosen by itself.
Grids vary the learning rate and the epochs; the reward model has one setting (its error is PPO's to bear).

DPO never samples: what it costs is passes over the preferences. How its distance falls with their number
is the question of `dpo_pairs.py`, on the answer pool, where maximum likelihood predicts it.

Measured with the defaults (18 CPU minutes), mean [95% interval] of five seeds:

              KL to optimum        gold   KL to ref.  held-out accuracy      CPU s
    SFT       1.43 [1.40, 1.46]   -0.01         0.09  0.484 [0.475, 0.494]      12
    DPO       0.82 [0.80, 0.85]    1.07         0.82  0.668 [0.659, 0.673]      28
    PPO       1.03 [1.00, 1.06]    0.53         0.35  0.631 [0.626, 0.636]      46, of which reward model 29
    optimum   0                    3.28         2.77

DPO is nearer by 0.21 [0.19, 0.25], in pairs of a seed. Gold itself predicts 0.71 of the held-out
preferences, the reward model 0.65. Over the grids DPO's distances go from 0.82 to 1.21, PPO's from 1.03 to
1.34; more epochs help both. More samples help PPO a little: on seed 0 it comes from 1.00 to 0.94 with 200,000
tokens, with 2 epochs as with 4, where DPO has 0.82. Neither is near the optimum: 13% of the optimum's
responses have the best pattern, "kobe", and 1 in 40,000 of the reference's: hardly a preference is about it.

Peak memory does not tell methods with networks of this size apart: it differs by some 30 MiB between runs of
one method (`memory_budget.py` counts what larger ones hold).

The command continues a comparison that was stopped. Under --out it leaves `summary.json`, `summary.csv`
and `dpo_vs_ppo.png`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from common.dpo_arms import make_start, train_dpo, train_ppo
from common.dpo_report import (
    Setting,
    Tuning,
    add_costs,
    difference,
    draw,
    exact_optimum,
    make_row,
    print_rows,
    print_tuning,
    tune,
    verdicts,
)
from common.files import write_json
from common.quick import apply_quick
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs, versions
from common.tables import make_console, write_csv

TRAIN = {"DPO": train_dpo, "PPO": train_ppo}


@dataclass(frozen=True)
class Args:
    """Compare DPO with PPO on a learned reward, at equal preferences, start, beta and grid size."""

    beta: float = 0.8
    """Weight of the KL to the reference, against rewards of deviation 1."""
    pairs: int = 20_000
    """Preferences that both methods learn from."""
    sft_samples: int = 32_000
    """Responses of the reference that the SFT policy has seen."""
    steps: int = 60_000
    """Tokens that PPO samples."""
    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    """Of both grids; each falls linearly to 0."""
    epochs: tuple[int, ...] = (1, 2)
    """The other axis of both grids: DPO's passes over the preferences, PPO's over each rollout."""
    runs: int = 5
    """Seeds of the comparison."""
    tuning_runs: int = 2
    """Seeds of each setting of the grids, others than those of the comparison."""
    samples: int = 2_000
    """Responses that a policy is measured by."""
    seed: int = 0
    """Of the first run; the following count up, those of the grids last."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/dpo_vs_ppo")
    """Folder for the runs, the tables and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A taste in a minute, in results/dpo_vs_ppo_quick: a tenth of the data, two settings of each
    method, one seed each, and two seeds of the comparison."""


QUICK: dict[str, Any] = {
    "pairs": 2_000, "sft_samples": 6_000, "steps": 8_000, "learning_rates": (1e-3, 3e-3), "epochs": (2,),
    "runs": 2, "tuning_runs": 1, "samples": 1_000,
    "out": Path("results/dpo_vs_ppo_quick"),
}  # fmt: skip


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name in ("pairs", "sft_samples", "steps", "runs", "tuning_runs", "samples", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    for name in ("learning_rates", "epochs"):
        values = getattr(args, name)
        if not values or min(values) <= 0 or len(set(values)) < len(values):
            raise ValueError(f"--{name.replace('_', '-')} is {values}: one or more different values above 0")
    if not args.beta > 0:
        raise ValueError(f"--beta is {args.beta}, must be above 0")


def common_config(args: Args, seed: int) -> dict[str, Any]:
    """What every run of a seed shares; a run is done only if it was done with these."""
    return {"seed": seed, "beta": args.beta, "sft_samples": args.sft_samples, "pairs": args.pairs,
            "samples": args.samples}  # fmt: skip


def start_jobs(args: Args) -> list[Job]:
    """The starts of all seeds: those of the comparison, then those of the grids."""
    seeds = range(args.seed, args.seed + args.runs + args.tuning_runs)
    return [Job(f"start/seed-{seed}", common_config(args, seed)) for seed in seeds]


def arm_job(args: Args, arm: str, learning_rate: float, n_epochs: int, seed: int) -> Job:
    """One run of DPO or PPO."""
    config = common_config(args, seed) | {
        "start": f"start/seed-{seed}", "learning_rate": learning_rate, "n_epochs": n_epochs
    }  # fmt: skip
    if arm == "PPO":
        config["steps"] = args.steps
    return Job(f"{arm.lower()}_lr-{learning_rate:g}_epochs-{n_epochs}/seed-{seed}", config)


def grid_jobs(args: Args, arm: str) -> list[Job]:
    """The grid of a method on the tuning seeds, setting by setting."""
    first = args.seed + args.runs
    return [
        arm_job(args, arm, learning_rate, n, seed)
        for learning_rate, n in itertools.product(args.learning_rates, args.epochs)
        for seed in range(first, first + args.tuning_runs)
    ]


def final_jobs(args: Args, chosen: Setting) -> list[Job]:
    """The chosen setting of a method on the seeds of the comparison."""
    seeds = range(args.seed, args.seed + args.runs)
    return [arm_job(args, chosen.arm, chosen.learning_rate, chosen.n_epochs, seed) for seed in seeds]


def read_grid(arm: str, outcomes: Sequence[Outcome]) -> Tuning:
    """The grid of a method from its runs."""
    found: dict[tuple[float, int], list[float]] = {}
    for outcome in outcomes:
        assert outcome.result is not None
        config = outcome.job.config
        found.setdefault((config["learning_rate"], config["n_epochs"]), []).append(outcome.result["kl_opt"])
    return tune([Setting(arm, rate, n, kl_opt) for (rate, n), kl_opt in found.items()])


class Failed(Exception):
    """A run failed, and was reported; there is no comparison without it."""


def run(args: Args, console: Console) -> tuple[list[Tuning], dict[str, list[dict[str, Any]]]]:
    """All runs: the grids of both methods, and the results of the comparison by method and seed."""

    def done(function: Any, jobs: list[Job], title: str) -> list[Outcome]:
        outcomes = run_jobs(function, jobs, args.out, args.workers, title, console)
        if report_failures(outcomes, console):
            raise Failed
        return outcomes

    starts = [outcome.result or {} for outcome in done(make_start, start_jobs(args), "SFT and reward models")]
    starts = starts[: args.runs]
    results = {"SFT": [start | {"cost": start["sft_cost"]} for start in starts]}
    tunings = []
    for arm, train in TRAIN.items():
        tuning = read_grid(arm, done(train, grid_jobs(args, arm), f"{arm}, the grid"))
        finals = done(train, final_jobs(args, tuning.chosen), f"{arm}, the chosen setting")
        tunings.append(tuning)
        results[arm] = [outcome.result or {} for outcome in finals]
    results["PPO"] = [
        result | {"cost": add_costs(start["model_cost"], result["cost"])}
        for start, result in zip(starts, results["PPO"], strict=True)
    ]
    return tunings, results


def report(
    console: Console, args: Args, tunings: list[Tuning], results: dict[str, list[dict[str, Any]]]
) -> None:
    """Print the tables, draw the figure and write the summaries."""
    exact = exact_optimum(args.beta)
    rows = [make_row(arm, runs) for arm, runs in results.items()]
    print_tuning(console, tunings)
    print_rows(console, args.beta, rows, exact)
    lines = verdicts(tunings, results, rows)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    figure = draw(results, tunings, args.beta, args.out / "dpo_vs_ppo.png")
    summary = {
        "args": args, "versions": versions(), "verdicts": lines, "optimum": exact, "rows": rows,
        "dpo_less_ppo": {name: difference(results, name) for name in ("gold", "objective", "kl_opt")},
        "grids": tunings, "runs": results, "figure": figure,
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    write_csv(args.out / "summary.csv", [vars(row) for row in rows])
    for path in (figure, args.out / "summary.json", args.out / "summary.csv"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Run the comparison and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    try:
        tunings, results = run(args, console)
    except KeyboardInterrupt:
        console.print("stopped; finished runs are kept, and the same command continues")
        return 130
    except Failed:
        return 1
    report(console, args, tunings, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
