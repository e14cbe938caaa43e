"""Does GRPO with a verifier teach a small GPT arithmetic beyond what it was shown, and what matters in it?

    python benchmarks/grpo_math.py
    python benchmarks/grpo_math.py --quick
    python benchmarks/grpo_math.py --presets deepseekmath dr-grpo dapo
    python benchmarks/grpo_math.py --parts groups --init results/grpo_math/grpo-8 --out results/from_grpo

`VerifiableMath-v0`: sums of two numbers of two digits, a token for each character, answers written from the
last digit on (a GPT learns those with far fewer examples; `--no-reverse-digits` is reading order). A GPT of
100,000 weights is fine-tuned on 300 solved problems until it solves a quarter of the validation problems.
Every run starts from there, draws problems of the whole train split and is told by the verifier whether an
answer is right: it never sees another solution. Weights are chosen on the validation problems and measured
on the held-out ones. No problem, in either order of its terms, is in two of the splits.

Parts: **main**, GRPO beside SFT continued on the same 300 problems for as many passes through the network;
**groups** of 2 to 16 at equal completions; **baselines**, RLOO, REINFORCE, PPO, and SB3's PPO (its own
network, cloned from the same 300 solutions); **controls**, GRPO on nothing but the 300 problems, and SFT on
the solutions of all train problems; **probes**, GRPO paid by a verifier that looks for the true number
anywhere in the answer; **chain**, SFT - GRPO - DPO on pairs of right and wrong answers, each from the weights
of the one before.

Measured with `--presets deepseekmath dr-grpo dapo` (seeds 3 to 5; everything was chosen on seeds 0 to 2), in
percent of the held-out problems: 30.1 after SFT (25.9, 30.2 and 34.1), 95.7 after GRPO with groups of 8
(91.4, 97.0, 98.6) in 92 seconds of one core, 59.7 after SFT continued (55.2, 56.5, 67.3) in 104, which is
near its end after a fifth of that. GRPO is at 90% of the validation problems after 56 seconds (median). It
does more than choose surely among the answers that SFT's samples hold already: one of 16 samples is right
for 64% of the problems after SFT, for 96% after GRPO. Its samples are nearly all alike then (pass@1 94%):
40% of the groups have no signal early on, 90% at the end.

At equal completions small groups do better: 99.3 with 2, 99.2 with 4, 92.2 [85.0, 98.3] with 16. REINFORCE
with the batch mean (99.4) and PPO (99.2) do as well without groups, RLOO with groups of 8 comes to 92.7
[89.4, 98.6], SB3's PPO to 85.4. The presets are not told apart: deepseekmath 96.5 [94.1, 99.5], dr-grpo 94.9
[89.7, 99.6], dapo 93.9 [87.6, 99.4]; wrong completions get a little longer than right ones in all. On
nothing but the 300 problems GRPO comes to 49.6; SFT on the solutions of all train problems is at 90% within
4 seconds and ends at 99.8.

The number of solved problems matters: with 400, SFT alone came to 95% of the validation problems (one seed);
with 250, one seed of three had 22% of the held-out ones after 215 epochs, and was sure of its answers (one
of 16 samples right for 35%). The lenient verifier is fooled by all three seeds: at the end it pays 94% of
the completions, and 2.6% are right. A quarter of GRPO's completions came to 71.3; DPO on pairs from there
improved no seed (47.2 with the last weights).

A command that was stopped continues. Under --out it leaves every run, `summary.json`, `table.csv` and
`grpo_math.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from agents import presets as known_presets
from common.files import write_json
from common.math_arms import PARTS, Arm, chosen_arms
from common.math_jobs import arm_job, start_job
from common.math_report import COLUMNS, Row, cells, draw, make_row, verdicts
from common.quick import apply_quick
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs, versions
from common.tables import flatten, make_console, print_table, write_csv

Part = Literal["main", "groups", "baselines", "controls", "probes", "chain"]
TABLE_WIDTH = 146


@dataclass(frozen=True)
class Args:
    """GRPO and others on arithmetic, from one fine-tuned GPT."""

    parts: tuple[Part, ...] = ("main", "groups", "baselines", "controls", "probes", "chain")
    """What to run; see above."""
    presets: tuple[str, ...] = ()
    """Presets of GRPO to compare, such as deepseekmath dr-grpo dapo; see `agents.presets`."""
    init: Path | None = None
    """Folder of an arm of an earlier call, such as results/grpo_math/grpo-8: every run starts from its
    weights (seed by seed) in place of fine-tuned ones."""
    digits: int = 2
    """Digits of each number."""
    reverse_digits: bool = True
    """Answers are written from the last digit on."""
    n_train: int = 300
    """Solved problems to fine-tune on."""
    start_accuracy: float = 0.25
    """Fine-tuning ends when so much of the validation problems is solved."""
    completions: int = 200_000
    """Completions of a run."""
    problems: int = 400
    """Held-out problems that are sampled for pass@k; greedy accuracy is that of all."""
    samples: int = 16
    """Samples of each."""
    seeds: int = 3
    """Runs of each arm; each has its own solved problems, weights and samples."""
    seed: int = 3
    """Seed of the first. The defaults were chosen on seeds 0 to 2."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/grpo_math")
    """Folder for the runs, the table and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The main line alone, two seeds and half the completions, in results/grpo_math_quick."""


QUICK: dict[str, Any] = {"parts": ("main",), "seeds": 2, "completions": 100_000,
                         "out": Path("results/grpo_math_quick")}  # fmt: skip


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name, least in (("n_train", 1), ("completions", 2048), ("problems", 1), ("samples", 8), ("seeds", 2),
                        ("digits", 1), ("workers", 1)):  # fmt: skip
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least {least}")
    if not 0 < args.start_accuracy <= 1:
        raise ValueError(f"--start-accuracy is {args.start_accuracy}, must be above 0 and at most 1")
    if not args.parts and not args.presets:
        raise ValueError(f"--parts is empty and so is --presets; parts: {', '.join(PARTS)}")
    for name in args.presets:
        known_presets.preset(name)
    for seed in range(args.seed, args.seed + args.seeds):
        if args.init is not None and not (args.init / f"seed-{seed}" / "agent.pt").exists():
            raise ValueError(f"--init {args.init} has no seed-{seed}/agent.pt")


def jobs_of(args: Args, arms: Sequence[Arm | None]) -> list[Job]:
    """A job for each arm and seed; None is the fine-tuning before all others."""
    shared = {"task": {"digits": args.digits, "reverse_digits": args.reverse_digits},
              "n_train": args.n_train, "start_accuracy": args.start_accuracy,
              "problems": args.problems, "samples": args.samples}  # fmt: skip
    given = "start" if args.init is None else str(args.init.resolve())
    jobs = []
    for arm in arms:
        for seed in range(args.seed, args.seed + args.seeds):
            config: dict[str, Any] = {"arm": "start", "seed": seed, **shared}
            if arm is not None:
                config |= {"arm": arm.name, "config": arm.config, "completions": args.completions,
                           "init": arm.start or given}  # fmt: skip
            jobs.append(Job(f"{config['arm']}/seed-{seed}", config))
    return jobs


def run_all(args: Args, arms: Sequence[Arm], console: Console) -> list[Outcome]:
    """Fine-tuning, then the arms that start from it, then those that start from other arms."""
    first, later = [a for a in arms if a.start is None], [a for a in arms if a.start is not None]
    outcomes = run_jobs(start_job, jobs_of(args, [None]), args.out, args.workers, "fine-tuning", console)
    for wave in (first, later):
        failed = any(outcome.error is not None for outcome in outcomes)
        if wave and not failed:
            outcomes += run_jobs(arm_job, jobs_of(args, wave), args.out, args.workers, "runs", console)
    return outcomes


def show(console: Console, args: Args, arms: Sequence[Arm], outcomes: Sequence[Outcome]) -> None:
    """Print the table and the verdicts, draw the figure and write the files."""
    console.width = max(console.width, TABLE_WIDTH)
    results: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            results.setdefault(outcome.job.config["arm"], []).append(outcome.result)
    start = results.pop("start")
    first = make_row("start", "after SFT", start)
    rows: list[Row] = [first]
    rows += [make_row(arm.name, arm.title, results[arm.name]) for arm in arms if arm.name in results]
    print_table(
        console,
        f"Sums of {args.digits}-digit numbers, {args.completions:,} completions a run, {args.seeds} seeds",
        COLUMNS,
        [cells(row) for row in rows],
        "Percent of held-out problems, with 95% intervals over seeds, of the weights that did best on the "
        "validation problems (and of the last ones). no signal: groups of equal rewards in training. "
        "lenient: samples in which the true answer occurs; length in tokens. CPU seconds of training, "
        "and to 90% of the validation problems (median of the seeds that got there).",
    )
    lines = verdicts({row.name: row for row in rows}, first)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    path = draw(arms, results, start, args.out / "grpo_math.png")
    write_json(args.out / "summary.json",
               {"args": args, "versions": versions(), "verdicts": lines, "table": rows})  # fmt: skip
    records = [flatten(vars(row) | {"to_90": None, "runs": None}) for row in rows]
    write_csv(args.out / "table.csv", records)
    for written in (path, args.out / "summary.json", args.out / "table.csv"):
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Run the parts and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    arms = chosen_arms(args.parts, args.presets)
    try:
        outcomes = run_all(args, arms, console)
    except KeyboardInterrupt:
        console.print("stopped; finished runs are kept, and the same command continues")
        return 130
    if any(outcome.result is not None for outcome in outcomes):
        show(console, args, arms, outcomes)
    return 1 if report_failures(outcomes, console) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
