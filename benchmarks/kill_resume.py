"""Runs killed at random moments: does `llmgym resume` always reach the numbers of an unbroken run?

    python benchmarks/kill_resume.py
    python benchmarks/kill_resume.py --kills 10

Each run is a process of its own that gets SIGKILL (`kill -9`) at a random moment: while it makes its
folder, collects, updates, writes a checkpoint, or evaluates at the end. It is resumed and killed again
until it is done. After every kill the folder must be readable and no more work be lost than that since
the last checkpoint; at the end its metrics, weights and evaluation must equal, to the last bit, those of
the same run in one piece. Under --out it leaves `summary.json` and every folder that failed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.progress import Progress

from agents.checkpoint import checkpoints, newest_state
from agents.cli import main as llmgym
from agents.run_folder import read_config
from common.files import write_json
from common.tables import make_console, print_table

# The steps of one iteration are given beside: that much more than a checkpoint interval can be lost.
RUNS: dict[str, tuple[int, str]] = {
    "PPO, CartPole, native rows": (
        148, "--env CartPole-v1 --n-envs 4 --steps 8000 --checkpoint-every 150 --config n_steps=37 "
             "batch_size=50 n_epochs=4 learning_rate=lin_0.003",
    ),
    "PPO, Pendulum, SyncVectorEnv": (
        64, "--env Pendulum-v1 --n-envs 2 --steps 3000 --checkpoint-every 64 --config n_steps=32 "
            "n_epochs=4 clip_range=lin_0.2",
    ),
    "PPO, answer pool with noise": (
        256, "--env AnswerPool-v0 --n-envs 16 --steps 20000 --checkpoint-every 256 --config n_steps=16 "
             "beta=0.3 --env-kwargs noise=0.1",
    ),
    "REINFORCE, CartPole, plain Env": (
        500, "--agent reinforce --env CartPole-v1 --n-envs 1 --steps 4000 --checkpoint-every 1 --config "
             "learning_rate=lin_0.003",
    ),
}  # fmt: skip
# What a process would import first; scipy, because it imports this script and what that needs.
PRELOADED = ["agents.cli", "agents.ppo", "agents.reinforce", "torch.utils.tensorboard", "scipy.stats"]


@dataclass(frozen=True)
class Args:
    """Kill runs at random moments, resume them, and compare them with unbroken ones."""

    kills: int = 100
    """Kills in all, spread over the kinds of runs."""
    seed: int = 0
    """Of the random moments (runs themselves always have the same seed)."""
    out: Path = Path("results/kill_resume")
    """Folder for summary.json and for runs that failed."""


@dataclass
class Kind:
    """One kind of run: its unbroken example, and what became of the killed ones."""

    iteration: int
    args: list[str]
    unbroken: Path
    seconds: float = 0.0
    kills: int = 0
    runs: int = 0
    lost_steps: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def work(args: list[str], log: str) -> None:
    """The killed process: one `llmgym` command, what it prints in a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    sys.exit(llmgym([*args, "--json"]))


def start(args: list[str], log: Path) -> Any:
    # The fork server has torch imported: a process is at work at once, and is a real one to kill.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=work, args=(args, str(log)))
    process.start()
    return process


def newest_time(folder: Path) -> int:
    """When the newest checkpoint was written, in ns; 0 where there is none."""
    try:
        return max((path.stat().st_mtime_ns for path in checkpoints(folder)), default=0)
    except FileNotFoundError:  # deleted since it was listed, for a newer one
        return newest_time(folder)


def wait_until_at_work(process: Any, folder: Path, before: int) -> None:
    """Wait for the checkpoint that a process writes as it begins to train, or resumes training."""
    while newest_time(folder) == before and process.is_alive():
        time.sleep(0.002)


def make_unbroken(kind: Kind) -> None:
    """Run it in one piece, and measure how long it is at work."""
    log = kind.unbroken.with_suffix(".txt")
    process = start(["train", *kind.args, "--out", str(kind.unbroken)], log)
    wait_until_at_work(process, kind.unbroken, 0)
    begun = time.monotonic()
    process.join()
    kind.seconds = time.monotonic() - begun
    if process.exitcode != 0:
        raise RuntimeError(f"the unbroken run failed: see {log}")


def killed_run(kind: Kind, folder: Path, kills: int, rng: np.random.Generator) -> int:
    """One run, killed up to ``kills`` times and then left to finish; the number of kills that hit."""
    log, hits = folder.with_suffix(".txt"), 0
    kind.runs += 1
    while not (folder / "result.json").exists():
        resume = folder.exists()
        args = ["resume", str(folder)] if resume else ["train", *kind.args, "--out", str(folder)]
        before = newest_time(folder)
        process = start(args, log)
        if hits < kills:
            if rng.random() < 0.8:  # the others may fall into the start
                wait_until_at_work(process, folder, before)
            process.join(rng.uniform(0.0, kind.seconds / 4))
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        if process.exitcode != -9:
            kind.failures.append(f"{folder}: exit status {process.exitcode}, see {log}")
            return hits
        hits += 1
        inspect(kind, folder)
    kind.failures.extend(f"{folder}: {what} differs" for what in differences(kind.unbroken, folder))
    return hits


def inspect(kind: Kind, folder: Path) -> None:
    """What a kill left: readable, and not more lost than the work since the last checkpoint."""
    if not folder.exists():
        kind.moments["before its folder"] += 1
        return
    try:
        read_config(folder)
        json.loads((folder / "versions.json").read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a damaged checkpoint is a warning
            state = newest_state(folder)
        metrics = folder / "metrics.jsonl"
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        steps = [json.loads(line)["step"] for line in lines]
    except Exception as error:
        kind.failures.append(f"{folder}: unreadable after a kill: {error!r}")
        return
    if state is None:
        kind.moments["before the first checkpoint"] += 1
        return
    every = read_config(folder).checkpoint_every or 0
    lost = max([0, *steps]) - state["num_timesteps"]
    kind.lost_steps = max(kind.lost_steps, lost)
    if lost > every + kind.iteration:
        kind.failures.append(f"{folder}: {lost} steps lost")
    if list((folder / "checkpoints").glob("*.tmp")):
        kind.moments["writing a checkpoint"] += 1
    elif state["num_timesteps"] >= read_config(folder).steps:
        kind.moments["evaluating"] += 1
    else:
        kind.moments["training"] += 1


def differences(unbroken: Path, resumed: Path) -> list[str]:
    """What is not the same, to the last bit."""
    found = []
    if (unbroken / "metrics.jsonl").read_bytes() != (resumed / "metrics.jsonl").read_bytes():
        found.append("metrics.jsonl")
    if (unbroken / "result.json").read_bytes() != (resumed / "result.json").read_bytes():
        found.append("result.json")
    a, b = newest_state(unbroken), newest_state(resumed)
    names = [[path.name for path in checkpoints(folder)] for folder in (unbroken, resumed)]
    if a is None or b is None or names[0] != names[1]:
        return [*found, "the checkpoints"]
    weights = zip(a["policy"].values(), b["policy"].values(), strict=True)
    if not all(torch.equal(x, y) for x, y in weights):
        found.append("the policy")
    moments = zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True)
    if not all(torch.equal(x[key], y[key]) for x, y in moments for key in x):
        found.append("the optimiser")
    if not torch.equal(a["generator"], b["generator"]):
        found.append("the generator")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if anything differed or was unreadable."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    console = make_console()
    work_folder = args.out / "runs"
    shutil.rmtree(work_folder, ignore_errors=True)
    work_folder.mkdir(parents=True)
    rng = np.random.default_rng(args.seed)
    kinds = {
        name: Kind(iteration, run.split(), work_folder / f"unbroken-{number}")
        for number, (name, (iteration, run)) in enumerate(RUNS.items())
    }
    begun, done = time.monotonic(), 0
    with Progress(console=console) as progress:
        bar = progress.add_task("kills", total=args.kills)
        for kind in kinds.values():
            make_unbroken(kind)
        while done < args.kills:
            kind = min(kinds.values(), key=lambda k: k.kills)
            folder = work_folder / f"killed-{done}"
            hits = killed_run(kind, folder, args.kills - done, rng)
            kind.kills += hits
            done += hits
            progress.update(bar, completed=done)
            if not any(failure.startswith(f"{folder}:") for failure in kind.failures):
                shutil.rmtree(folder)
                folder.with_suffix(".txt").unlink()
    failures = [failure for kind in kinds.values() for failure in kind.failures]
    rows: list[dict[str, Any]] = [
        {
            "run": name, "runs": k.runs, "kills": k.kills, "moments": dict(k.moments),
            "most_steps_lost": k.lost_steps, "seconds_unbroken": round(k.seconds, 2),
            "failures": k.failures,
        }
        for name, k in kinds.items()
    ]  # fmt: skip
    seconds = time.monotonic() - begun
    write_json(args.out / "summary.json", {"kills": done, "seconds": seconds, "kinds": rows})
    print_table(
        console,
        "kill -9 and resume",
        ["run", "runs", "kills", "where the kills fell", "most steps lost", "equal to unbroken"],
        [
            [
                r["run"], str(r["runs"]), str(r["kills"]),
                ", ".join(f"{n} {moment}" for moment, n in r["moments"].items()),
                str(r["most_steps_lost"]), "no" if r["failures"] else "yes",
            ]
            for r in rows
        ],
    )  # fmt: skip
    console.print(f"{done} kills in {seconds:.0f} s, {len(failures)} failures; {args.out / 'summary.json'}")
    for failure in failures:
        console.print(f"failed: {failure}", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
