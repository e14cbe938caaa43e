"""What does each policy-gradient estimator of post-training optimise, how noisily, and where does it end?

    python benchmarks/estimator_lab.py
    python benchmarks/estimator_lab.py --quick

64 prompts with known rewards, so that every answer is exact: once 16 answers right or wrong with pass rates
from 2% to 98% (a verifier's rewards), once 4 answers with real-valued rewards. Three parts:

**Gradients.** At the reference policy, groups of 2 to 64 answers a prompt: mean and variance of every
estimator's gradient beside their exact values. `common.lab_theory` derives them, and what objective each
belongs to. In short: REINFORCE, ReMax and RLOO have the gradient of E[r]; the group's mean, which includes
the answer itself, has it times 1 - 1/G; the deviation of a large batch, or whitening, is another step size.

**Dividing by the group's standard deviation changes the objective.** For rewards 0 and 1, E[r] = p is
replaced by F_G(p) (`common.lab_theory.prompt_objective`), an S-shaped function that tends to
2 arcsin(sqrt(p)) as groups grow: nearly solved and nearly hopeless prompts weigh up to sqrt(G) times
their gradient, those in between twice. At G = 2 and 3 nothing changes. For other rewards no objective has
this gradient: at G = 2 only the order of the rewards counts, and with large groups each prompt's gradient is
divided by its own deviation.

**Training.** Each arm of `common.lab_arms` on the pool of right and wrong answers with a KL of weight beta to
the reference, at equal sampled answers, ten seeds, beside the exact point at which its expected gradient
rests. With the KL in the reward that is the optimum for all. In the loss the KL is not scaled with the
advantage: 1 - 1/G makes beta larger by G / (G - 1), twice at G = 2; dividing by a deviation makes it smaller,
so much that the KL hardly holds the policy; k3 has another resting point; with k1 nothing holds the policy.

**Lengths.** In a task of one step all `loss_type`s are the same. `common.lab_length` shows them on the task
of when to stop: the mean over each answer's own tokens maximises the advantage per token: answers grow.

Measured with the defaults, ten runs: means, cosines and variances are within 3.0 standard errors of the exact
ones. At equal samples RLOO has at most two thirds of ReMax's variance from groups of 4 on; dividing by the
group's deviation adds 10% at G = 8 and a third at G = 64 for rewards 0 and 1, and takes 15% off at G = 64 for
real-valued ones, whose gradient it turns by 22 to 28 degrees. With the KL in the reward, KL(policy ||
optimum) is 0.0008 for PPO, 0.0017 for RLOO and GRPO without deviation (the same but for a factor that Adam
removes), 0.0051 with the group's deviation, 0.014 for ReMax, 0.055 for REINFORCE without a baseline. The
step size is one for all (a quarter for each of PPO's four steps) and suits the noisy ones least. With k2 in
the loss it is 0.148 at G = 2 without deviation, with E[r] 0.70 in place of 0.86, and 0.130 at G = 8 with the
group's deviation, with E[r] 0.98 and still on its way to 0.998.

A command that was stopped continues. Under --out it leaves every run, `summary.json`, `table.csv`,
`gradients.csv` and `estimator_lab.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console

from common import lab_length as length
from common.compare import MARGIN, Comparison
from common.files import write_json
from common.lab_arms import ANSWERS, ARMS
from common.lab_figure import draw
from common.lab_gradient import POOLS, Result, gradient_job
from common.lab_length import LengthResult, measure_lengths
from common.lab_rows import COLUMNS, Row, cells, flat, make_rows, read_result
from common.lab_theory import prompt_weight
from common.lab_training import training_job
from common.quick import apply_quick
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs, versions
from common.tables import make_console, print_table, write_csv

STOPS = (0.07, 0.1, 0.14, 0.19, 0.26, 0.33, 0.45, 0.6)
TABLE_WIDTH = 146
COMPARED = ("length", "cosine", "own_length", "own_bias", "variance")


@dataclass(frozen=True)
class Args:
    """Gradients, objectives and final policies of the estimators of post-training, against exact values."""

    group_sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    """Answers in a group, for the gradients."""
    gradient_answers: int = 1_000_000
    """Answers sampled for the gradients at each group size of each pool."""
    beta: float = 0.3
    """Weight of the KL to the reference in training."""
    answers: int = 61_440
    """Answers sampled by a training run, 512 an update."""
    learning_rate: float = 0.2
    """Adam's step size at the start, falling to 0. The default was chosen on seed 100."""
    length_batches: int = 100
    """Batches of 512 answers for each point of the lengths."""
    seeds: int = 10
    """Training runs of each arm."""
    seed: int = 0
    """Seed of the first run, of the gradients and of the lengths."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/estimator_lab")
    """Folder for the runs, the tables and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Three runs of each arm and fewer samples for gradients and lengths, in results/estimator_lab_quick."""


QUICK: dict[str, Any] = {
    "gradient_answers": 200_000,
    "length_batches": 40,
    "seeds": 3,
    "out": Path("results/estimator_lab_quick"),
}


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name, least in (("gradient_answers", 1), ("answers", ANSWERS), ("length_batches", 2), ("seeds", 2),
                        ("workers", 1)):  # fmt: skip
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least {least}")
    if not args.group_sizes or min(args.group_sizes) < 2:
        raise ValueError(f"--group-sizes {args.group_sizes} is not allowed: one or more numbers >= 2")
    for name in ("beta", "learning_rate"):
        if not (np.isfinite(getattr(args, name)) and getattr(args, name) > 0):
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be above 0")


def gradient_jobs(args: Args) -> list[Job]:
    """One job for each pool and group size."""
    return [
        Job(f"gradients/{pool}-{size}", {"pool": pool, "group_size": size, "seed": args.seed,
                                         "answers": args.gradient_answers})
        for size in sorted(set(args.group_sizes))
        for pool in POOLS
    ]  # fmt: skip


def training_jobs(args: Args) -> list[Job]:
    """One job for each arm and seed."""
    settings = {"beta": args.beta, "learning_rate": args.learning_rate, "answers": args.answers}
    return [
        Job(f"training/{''.join(c if c.isalnum() else '-' for c in arm.name)}/seed-{seed}",
            {"arm": arm.name, "seed": seed, **settings})
        for arm in ARMS
        for seed in range(args.seed, args.seed + args.seeds)
    ]  # fmt: skip


def verdicts(results: Sequence[Result], rows: Sequence[Row], lengths: Sequence[LengthResult]) -> list[str]:
    """What the numbers say, one sentence a line."""
    exact: list[Comparison] = [getattr(r, name) for r in results if r.exact for name in COMPARED]
    worst = max((abs(c.z) for c in exact), default=0.0)
    limits = [
        abs(c.measured / c.analytic - 1) for r in results if not r.exact for c in (r.length, r.variance)
    ]
    stops = max((abs(r.gradient.z) for r in lengths), default=0.0)
    lines = [
        f"Exact means, cosines and variances hold: {'yes' if worst <= MARGIN else 'NO'}, at most {worst:.1f} "
        f"standard errors off in {len(exact)} comparisons. Where only the limit of large batches is known, "
        f"measured values differ from it by up to {100 * max(limits, default=0.0):.1f}%.",
    ]
    for size in (8, 64):
        low, middle = prompt_weight(np.array([0.02, 0.5]), size)
        lines.append(
            f"Groups of {size} divided by their deviation: a prompt with pass rate 2% weighs "
            f"{low / middle:.2f} times one with 50% (without: 1; in the limit "
            f"{np.sqrt(0.25 / (0.02 * 0.98)):.2f})."
        )
    named = {row.name: row for row in rows}
    optimum = next(row.reward_expected for row in rows if row.kl_in == "reward")
    for name in ("k2, no std, G = 2", "k3, no std", "k2, group std", "k2, batch std"):
        row = named[name]
        if row.kl_optimum.value is not None:
            lines.append(
                f"KL in the loss, {name}: the resting point is {row.kl_expected:.3f} nats from the optimum, "
                f"runs end {row.kl_optimum.value:.3f} from it; E[r] {row.reward_expected:.3f} there, runs "
                f"{row.reward.value:.3f}, optimum {optimum:.3f}."
            )
    ranked = sorted(
        (row for row in rows if row.kl_in == "reward" and row.kl_optimum.value is not None),
        key=lambda row: row.kl_optimum.value or 0.0,
    )
    if ranked:
        lines.append(
            "KL in the reward, nearest to the optimum at equal samples: "
            + "; ".join(f"{row.name} {row.kl_optimum.value:.4f}" for row in ranked) + "."
        )  # fmt: skip
    rest, best = length.resting_stop("grpo"), length.resting_stop("dr_grpo")
    lines.append(
        f"A mean over each answer's own tokens rests at answers of {length.mean_length(rest):.1f} tokens, "
        f"the best have {length.mean_length(best):.1f} (measured gradients at most {stops:.1f} standard "
        "errors off)."
    )
    return lines


def show(
    console: Console, args: Args, results: list[Result], rows: list[Row], lengths: list[LengthResult]
) -> None:
    """Print the table and the verdicts, draw the figure and write the files."""
    console.width = max(console.width, TABLE_WIDTH)
    table = [cells(row) for row in rows]
    first = next(i for i, row in enumerate(rows) if row.kl_in == "loss")
    blank = [""] * (len(COLUMNS) - 1)
    table = [["KL in the reward", *blank], *table[:first], ["GRPO, KL in the loss", *blank], *table[first:]]
    print_table(
        console,
        f"Estimators on 64 prompts; G = 8 where not said, beta {args.beta:g}, {args.answers:,} answers a run",
        COLUMNS,
        table,
        "step: length of the mean gradient along that of E[r], 1: unbiased; cos: between the two; noise: "
        "variance per sampled answer over the squared mean; real: on real-valued rewards, all else on "
        "rewards 0 and 1. expected: KL(resting point || optimum), exact, in nats; after it KL(policy || "
        f"optimum) of the final policies, mean of {args.seeds} runs and 95% interval, their KL to the "
        "resting point, and E[r]. Answers are one step: every loss_type is the same.",
    )
    lines = verdicts(results, rows, lengths)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    path = draw(results, rows, lengths, args.out / "estimator_lab.png")
    write_json(
        args.out / "summary.json",
        {"args": args, "versions": versions(), "verdicts": lines, "table": rows, "gradients": results,
         "lengths": lengths, "length_rests": {t: length.resting_stop(t) for t in length.TYPES}},
    )  # fmt: skip
    write_csv(args.out / "table.csv", [flat(row) for row in rows])
    write_csv(args.out / "gradients.csv", [gradient_record(r) for r in results])
    for written in (path, *(args.out / name for name in ("summary.json", "table.csv", "gradients.csv"))):
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)


def gradient_record(result: Result) -> dict[str, Any]:
    """A `Result` for CSV: analytic, measured and standard error of everything compared."""
    names = ("pool", "group_size", "estimator", "objective", "exact")
    record: dict[str, Any] = {name: getattr(result, name) for name in names}
    for name in (*COMPARED, "noise"):
        compared = getattr(result, name)
        record |= {f"{name}_analytic": compared.analytic, f"{name}_measured": compared.measured,
                   f"{name}_standard_error": compared.standard_error}  # fmt: skip
    return record


def main(args: Args) -> int:
    """Run all parts and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    try:
        for function, jobs, title in ((gradient_job, gradient_jobs(args), "gradients"),
                                      (training_job, training_jobs(args), "training runs")):  # fmt: skip
            outcomes += run_jobs(function, jobs, args.out, args.workers, title=title, console=console)
        lengths = measure_lengths(args.length_batches, args.seed, STOPS)
    except KeyboardInterrupt:
        console.print("stopped; finished runs are kept, and the same command continues")
        return 130
    results, trained = [], []
    for outcome in outcomes:
        if outcome.result is not None and "pool" in outcome.job.config:
            results += [read_result(record) for record in outcome.result["results"]]
        elif outcome.result is not None:
            trained.append(outcome)
    if results and trained:
        show(console, args, results, make_rows(results, trained, args.beta), lengths)
    return 1 if report_failures(outcomes, console) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
