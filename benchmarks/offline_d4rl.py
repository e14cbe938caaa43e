"""Do CQL and IQL learn more from logged data than cloning it does, and does it show within the noise?

    python benchmarks/offline_d4rl.py --quick
    python benchmarks/offline_d4rl.py --datasets halfcheetah-medium hopper-medium walker2d-medium --seeds 3
    python benchmarks/offline_d4rl.py --data ~/.d4rl/datasets --steps 1000000

A dataset is named as in D4RL: halfcheetah, hopper or walker2d, and what acted: **medium** (a policy trained
half-way), **random**, **mixed** (half and half of both) or **replay** (all that an agent met while it was
trained). Where the folder --data has the HDF5 file (hopper-medium-v2.hdf5 or hopper-medium.hdf5), it is used
as it is, and any other kind may be named. What is missing is collected with `offline.collect`, in today's
MuJoCo environments: the same kind of data, but not D4RL's own.

Algorithms have the settings of their papers (see `offline.configs`); cql is cql-10, CQL with alpha 10. A run
takes --steps gradient steps on one thread. The papers take 1,000,000; the default is a twentieth of that, for
CPUs, where CQL takes more than 100 ms a step, IQL about 10 and BC 2. --hidden makes the networks smaller.
Every --eval-every steps the deterministic policy plays --episodes episodes, which start the same for all
algorithms and seeds. Scores are normalised as D4RL's: 0 is a random policy's return, 100 an expert's. Two
runs of an algorithm differ in their initial weights and minibatches; they share the data, so intervals say
nothing of how another collection would have come out. The data's own score is the mean over its episodes:
most episodes of mixed data are random ones, which are short, so those of each policy are given too.

Of algorithms with a critic the table also shows what it promises and what comes true: Q(s, pi(s)) at the
starts of the evaluation episodes beside their discounted return (gamma 0.99), and Q(s, a) at rows of the
data, where the row "the data itself" has the discounted return of the policy that acted. `sac` is there for
that: it is SAC on logged data with nothing against over-estimation.

Measured with --quick (13 minutes on two cores): mean scores of the last ten evaluations are 35.1 [33.3,
38.4] for TD3+BC, 9.6 [5.3, 17.7] for BC, 3.6 [3.1, 4.5] for IQL and 2.3 [2.2, 2.5] for CQL, where the data's
medium episodes have 42.7 and its random ones 1.2. After 8,000 steps the critics of CQL and IQL still promise
less than half of what follows. On hopper-medium, 20,000 steps with --hidden 64, the last checkpoints have
48.8 (BC), 6.5 (CQL), 58.4 (IQL) and 51.9 (TD3+BC), the data 41.9; by the means of the last ten evaluations
CQL is below BC and TD3+BC, and nothing else is decided. One seed of IQL there was at 1 after 10,000 of
60,000 steps, and at 37 at the end.

A command that was stopped continues, each run from its last evaluation. Under --out it leaves the data, every
run, `evaluations.csv`, `table.csv`, `summary.json` and the learning curves of each dataset.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from agents.run_folder import UserError
from common import offline_report as report
from common.files import write_json
from common.offline_jobs import data_config, data_job, plain_name, train_job
from common.quick import apply_quick
from common.runner import Job, Outcome, available_cores, report_failures, run_jobs, versions
from common.tables import flatten, make_console, print_table, write_csv

Algo = Literal["bc", "cql", "cql-1", "cql-10", "iql", "td3bc", "rebrac", "sac"]
TABLE_WIDTH = 146


@dataclass(frozen=True)
class Args:
    """Offline algorithms on D4RL-style data: scores, intervals and over-estimation."""

    datasets: tuple[str, ...] = ("halfcheetah-medium", "hopper-medium", "walker2d-medium")
    """Names as in D4RL, such as hopper-medium; see above."""
    algos: tuple[Algo, ...] = ("bc", "cql", "iql")
    """Algorithms; cql is cql-10."""
    data: Path | None = None
    """Folder of D4RL's HDF5 files. What it lacks is collected."""
    data_steps: int = 200_000
    """Transitions of a dataset that is collected; D4RL's have 1,000,000."""
    data_seed: int = 0
    """Of collecting."""
    seeds: int = 3
    """Runs of each algorithm on each dataset."""
    seed: int = 0
    """Seed of the first."""
    steps: int = 50_000
    """Gradient steps of a run; the papers' 1,000,000 take twenty times as long."""
    hidden: int | None = None
    """Two hidden layers of so many units in every network; default: the papers', two or three of 256."""
    eval_every: int = 2_500
    """Gradient steps between two evaluations."""
    episodes: int = 10
    """Episodes of each."""
    workers: int = available_cores()
    """Runs at a time, each on one thread."""
    out: Path = Path("results/offline_d4rl")
    """Folder for the data, the runs, the tables and the figures."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """About 15 minutes on two idle cores: hopper-mixed, 8,000 steps, two hidden layers of 128, TD3+BC too,
    in results/offline_d4rl_quick."""


QUICK: dict[str, Any] = {"datasets": ("hopper-mixed",), "algos": ("bc", "cql", "iql", "td3bc"),
                         "data_steps": 100_000, "steps": 8_000, "hidden": 128, "eval_every": 400,
                         "out": Path("results/offline_d4rl_quick")}  # fmt: skip


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name, least in (("data_steps", 1), ("data_seed", 0), ("seeds", 1), ("seed", 0), ("steps", 1),
                        ("eval_every", 1), ("episodes", 1), ("workers", 1)):  # fmt: skip
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least {least}")
    if args.hidden is not None and args.hidden < 1:
        raise ValueError(f"--hidden is {args.hidden}, must be at least 1")
    if args.steps % args.eval_every:
        raise ValueError(f"--steps is {args.steps}, must be a multiple of --eval-every, {args.eval_every}")
    for option, given in (("--datasets", [plain_name(n) for n in args.datasets]), ("--algos", args.algos)):
        if not given:
            raise ValueError(f"{option} is empty")
        if len(set(given)) < len(given):
            raise ValueError(f"{option} has a name twice: {', '.join(given)}")
    if {"cql", "cql-10"} <= set(args.algos):
        raise ValueError("--algos has cql and cql-10, which are the same")
    if args.data is not None and not args.data.is_dir():
        raise ValueError(f"--data {args.data} is not a folder")


def data_jobs(args: Args) -> list[Job]:
    """A job for each dataset."""
    return [
        Job(f"data/{name}", data_config(name, args.data, args.data_steps, args.data_seed))
        for name in map(plain_name, args.datasets)
    ]


def train_jobs(args: Args, data: Sequence[Outcome]) -> list[Job]:
    """A job for each dataset, algorithm and seed; the longest algorithms first, so that none runs alone."""
    settings = {name: getattr(args, name) for name in ("steps", "hidden", "eval_every", "episodes")}
    jobs = []
    for outcome in data:
        assert outcome.result is not None
        source = {"dataset": outcome.job.config["dataset"], "data": outcome.job.config,
                  "path": outcome.result["path"]}  # fmt: skip
        for algo in args.algos:
            for seed in range(args.seed, args.seed + args.seeds):
                name = f"{source['dataset']}/{algo}/seed-{seed}"
                jobs.append(Job(name, source | {"algo": algo, "seed": seed} | settings))
    return sorted(jobs, key=lambda job: not job.config["algo"].startswith("cql"))


def origin(data: report.Data) -> str:
    """Where the data is from: scores on collected data are not those of D4RL's."""
    collected = [name for name, each in data.items() if each["collected"]]
    if not collected:
        return "Data: the files of --data."
    others = "" if len(collected) == len(data) else " The others are the files of --data."
    return (
        f"{', '.join(collected)}: collected with this project, not D4RL's own data, on which the published "
        f"scores are.{others}"
    )


def show(console: Console, args: Args, data: report.Data, outcomes: Sequence[Outcome]) -> None:
    """Print tables and verdicts, draw the figures and write the files."""
    console.width = max(console.width, TABLE_WIDTH)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {algo: [] for algo in args.algos} for name in data
    }
    for outcome in outcomes:
        if outcome.result is not None:
            config = outcome.job.config
            results[config["dataset"]][config["algo"]].append(outcome.result)
    results = {name: {a: runs for a, runs in algos.items() if runs} for name, algos in results.items()}
    rows = report.make_rows(results)
    count = args.steps // args.eval_every
    few = f" (all {count} that there are)" if count < report.LAST else ""
    print_table(
        console,
        f"Normalised scores: {args.seeds} seeds, {args.steps:,} gradient steps, {args.episodes} episodes "
        f"every {args.eval_every:,}",
        report.SCORE_COLUMNS,
        report.score_table(rows, data),
        "Means over seeds with 95% bootstrap intervals. deviation: of a run's score over its last "
        f"{report.LAST} evaluations{few}, mean over seeds. published: on D4RL's v2 data after 1M steps "
        f"(Kostrikov et al. 2021). {origin(data)}",
    )
    values = report.value_table(rows, data)
    if values:
        print_table(
            console, "What critics promise at the last checkpoint, and what comes true", report.VALUE_COLUMNS,
            values,
            "Discounted with gamma 0.99. At starts: Q(s, pi(s)) beside the return of the same episodes. On "
            "data rows: Q(s, a) beside what the data itself got from there.",
        )  # fmt: skip
    lines = report.verdicts(rows, data)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    written = [
        report.draw(name, algos, data[name], args.out / f"curves_{name}.png")
        for name, algos in results.items()
        if algos
    ]
    for name, records in (
        ("evaluations.csv", report.evaluation_rows(results)),
        ("table.csv", [flatten(vars(row) | {"runs": None}) for row in rows]),
    ):
        write_csv(args.out / name, records)
        written.append(args.out / name)
    written.append(args.out / "summary.json")
    packages = {name: importlib.metadata.version(name) for name in ("d3rlpy", "mujoco")}
    write_json(written[-1], {"args": args, "versions": versions() | packages, "data": data,
                             "origin": origin(data), "verdicts": lines, "table": rows})  # fmt: skip
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Collect, train and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
        datasets = data_jobs(args)
    except (ValueError, UserError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    try:
        collected = run_jobs(data_job, datasets, args.out, args.workers, "datasets", console)
        if report_failures(collected, console):
            return 1
        outcomes = run_jobs(train_job, train_jobs(args, collected), args.out, args.workers, "runs", console)
    except KeyboardInterrupt:
        console.print("stopped; what is done is kept, and the same command continues")
        return 130
    data = {outcome.job.config["dataset"]: outcome.result for outcome in collected}
    if any(outcome.result is not None for outcome in outcomes):
        show(console, args, data, outcomes)  # type: ignore[arg-type]
    return 1 if report_failures(outcomes, console) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
