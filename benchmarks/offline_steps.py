"""What a gradient step of the offline algorithms costs: ours beside bare d3rlpy, in turns, in one run.

    python benchmarks/offline_steps.py
    python benchmarks/offline_steps.py --quick
    python benchmarks/offline_steps.py --algos bc iql --steps 1000

The arms:

    d3rlpy      ``algo.update(buffer.sample_transition_batch(batch_size))`` in a loop, on d3rlpy's own
                MDPDataset: d3rlpy without its logging
    llmgym      ``agent.fit(dataset, steps)``, with its metrics (in memory: there is no run folder)
    sampling    both ways of drawing a batch alone, as far as the batch is a TorchMiniBatch

Data: random numbers of HalfCheetah's sizes (17 observations, 6 actions) in episodes of 1000 steps, cut
by a limit; no time depends on their values. Networks and batches are those of the papers, one torch
thread. Arms take turns and a ratio is taken within each pair, so that a busy spell of the machine meets
both; the targets are judged by CPU time. Under --out it leaves `summary.json` and `samples.csv`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from d3rlpy.dataset import MDPDataset
from d3rlpy.torch_utility import TorchMiniBatch
from rich.console import Console

from common.files import write_json
from common.quick import apply_quick
from common.runner import versions
from common.stats import Estimate
from common.tables import interval, make_console, print_table, write_csv
from common.timing import CLOCKS, Sample, Timing, Work, in_turns, now, rates, speed_ratios, spread
from offline.algorithms import make
from offline.configs import names
from offline.datasets import Dataset, make_dataset

OURS, BARE = "llmgym", "d3rlpy"
SAMPLING = "sampling"
OBSERVATION_SIZE, ACTION_SIZE, EPISODE = 17, 6, 1000
# Speed of ours over that of d3rlpy, at least.
TARGETS = {"bc": 1.0, "iql": 1.0, "cql": 1 / 1.05}
# CPU time of a step over that of BC, so that every algorithm is measured about as long.
COST = {"bc": 1, "iql": 4, "td3bc": 4, "rebrac": 12, "sac": 6, "cql": 50, "cql-1": 50, "cql-10": 50}


@dataclass(frozen=True)
class Args:
    """Measure gradient steps of the offline algorithms beside d3rlpy's."""

    algos: tuple[str, ...] = ("bc", "cql", "iql")
    """Algorithms, for continuous actions."""
    steps: int = 800
    """Gradient steps of BC in a sample; dearer algorithms take fewer, at least 10."""
    turns: int = 8
    """Samples of each arm."""
    rows: int = 100_000
    """Rows of data."""
    seed: int = 0
    """Of the data and of the networks."""
    out: Path = Path("results/offline_steps")
    """Folder for the files."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A taste in about half a minute: of the options left at their defaults, --steps becomes 100, --turns 2,
    --rows 10000, --out results/offline_steps_quick."""


QUICK: dict[str, Any] = {
    "steps": 100, "turns": 2, "rows": 10_000, "out": Path("results/offline_steps_quick"),
}  # fmt: skip


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    allowed = names(discrete=False)
    unknown = [name for name in args.algos if name not in allowed]
    if unknown or not args.algos or len(set(args.algos)) < len(args.algos):
        raise ValueError(f"--algos {args.algos} is not allowed: different names out of {', '.join(allowed)}")
    for name in ("steps", "turns"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least 1")
    if args.rows < EPISODE:
        raise ValueError(f"--rows is {args.rows}, must be at least {EPISODE}")


def make_data(rows: int, seed: int) -> Dataset:
    """Random transitions of HalfCheetah's sizes in episodes that a limit cuts."""
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((rows, OBSERVATION_SIZE), np.float32)
    actions = np.tanh(rng.standard_normal((rows, ACTION_SIZE), np.float32))
    timeouts = np.arange(rows) % EPISODE == EPISODE - 1
    rewards = rng.standard_normal(rows, np.float32)
    following = rng.standard_normal((rows, OBSERVATION_SIZE), np.float32)
    return make_dataset(observations, actions, rewards, np.zeros(rows), timeouts, following)


def timed(work: Callable[[], Any], steps: int) -> tuple[float, Timing, dict[str, Any]]:
    start = now()
    work()
    return float(steps), now() - start, {}


def steps_of(name: str, args: Args) -> int:
    return max(10, args.steps // COST[name])


def step_arms(name: str, args: Args, data: Dataset, buffer: MDPDataset) -> dict[str, Work]:
    """Both arms of one algorithm, from the same untrained networks."""
    steps = steps_of(name, args)

    def ours(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        agent = make(name, data, seed)
        agent.fit(data, 2)  # the first steps make the optimiser's state
        return timed(lambda: agent.fit(data, steps), steps)

    def bare(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        algo = make(name, data, seed).algo

        def loop(n: int) -> None:
            for _ in range(n):
                algo.update(buffer.sample_transition_batch(algo.batch_size))

        loop(2)
        return timed(lambda: loop(steps), steps)

    return {OURS: ours, BARE: bare}


def sampling_arms(args: Args, data: Dataset, buffer: MDPDataset) -> dict[str, Work]:
    """Drawing batches of 256 alone."""
    steps = max(10, args.steps // 2)
    config = make("bc", data, args.seed).config

    def ours(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        sampler = make("bc", data, seed).sampler(data)
        return timed(lambda: [sampler.sample() for _ in range(steps)], steps)

    def bare(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        def loop() -> None:
            for _ in range(steps):
                batch = buffer.sample_transition_batch(config.batch_size)
                TorchMiniBatch.from_batch(batch, config.gamma, False, "cpu")

        return timed(loop, steps)

    return {OURS: ours, BARE: bare}


def milliseconds(samples: list[Sample], case: str, arm: str, clock: Any) -> Estimate:
    """Median, smallest and largest time of a step."""
    return spread([1000 / rate for rate in rates(samples, case, arm, clock)])


def report(console: Console, args: Args, samples: list[Sample]) -> list[dict[str, Any]]:
    """Print the table and the verdicts; the rows of both."""
    rows = []
    for case in dict.fromkeys(sample.case for sample in samples):
        steps = next(sample.amount for sample in samples if sample.case == case)
        row: dict[str, Any] = {"case": case, "steps": steps}
        for clock in CLOCKS:
            row |= {f"{arm}_ms_{clock}": milliseconds(samples, case, arm, clock) for arm in (OURS, BARE)}
            row[f"speed_ratio_{clock}"] = spread(speed_ratios(samples, case, OURS, BARE, clock))
        row["target"] = TARGETS.get(case)
        rows.append(row)
    table = [
        [
            row["case"], interval(row[f"{OURS}_ms_cpu"], 3), interval(row[f"{BARE}_ms_cpu"], 3),
            interval(row["speed_ratio_cpu"], 2), interval(row["speed_ratio_wall"], 2),
        ]
        for row in rows
    ]  # fmt: skip
    columns = [
        "a step of", f"{OURS}, ms of CPU", f"{BARE}, ms of CPU", "times as fast, CPU", "times as fast, wall"
    ]
    caption = f"median [smallest, largest] of {args.turns} turns; sampling is drawing a batch of 256 alone"
    print_table(console, "Gradient steps", columns, table, caption)
    for row in rows:
        if row["target"] is not None:
            row["reached"] = row["speed_ratio_cpu"].value >= row["target"]
            verdict = "reached" if row["reached"] else "missed"
            console.print(
                f"target {verdict}: {row['case']} at {row['speed_ratio_cpu'].value:.2f} times d3rlpy's speed "
                f"(at least {row['target']:.2f})", highlight=False,
            )  # fmt: skip
    return rows


def main(args: Args) -> int:
    """Measure, report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    torch.set_num_threads(1)
    data = make_data(args.rows, args.seed)
    samples: list[Sample] = []
    with console.status("making d3rlpy's buffer") as status:
        with redirect_stdout(StringIO()):  # it says what it has guessed
            buffer = MDPDataset(
                data.observations, data.actions, data.rewards, data.terminals, data.timeouts
            )
        arms = {name: step_arms(name, args, data, buffer) for name in args.algos}
        arms[SAMPLING] = sampling_arms(args, data, buffer)
        for case, works in arms.items():
            samples += in_turns(
                case, works, [args.seed], args.turns,
                lambda s: status.update(f"{s.case}, {s.arm}, turn {s.turn} done"),
            )  # fmt: skip
    rows = report(console, args, samples)
    flat = [
        {
            "case": s.case, "arm": s.arm, "turn": s.turn, "steps": s.amount,
            "cpu_seconds": s.timing.cpu, "wall_seconds": s.timing.wall,
        }
        for s in samples
    ]  # fmt: skip
    write_json(args.out / "summary.json", {"args": args, "versions": versions(), "results": rows})
    write_csv(args.out / "samples.csv", flat)
    for name in ("summary.json", "samples.csv"):
        console.print(f"wrote {args.out / name}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
