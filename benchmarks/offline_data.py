"""How fast is a D4RL file read into a checked record, and how much memory does that take?

    python benchmarks/offline_data.py
    python benchmarks/offline_data.py --quick

A file of random numbers in HalfCheetah's shape (17 observations, 6 actions) is read by `read_d4rl`, and its
arrays by h5py alone, in turns, with the file in the page cache. Three files:

    stored      as `write_d4rl` writes it, with next observations
    derived     without them, as D4RL's first files: they are made from the following rows, so that the
                record holds 1.8 times the arrays of the file
    gzip        stored, compressed as D4RL's own files

Memory is how far a new process grows at its peak, over the bytes of the arrays of the record. Targets: at
least half of h5py's speed, and at most 1.5 times the arrays. Under --out it leaves `summary.json`.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import h5py
import numpy as np
import tyro
from rich.console import Console

from common.files import write_json
from common.quick import apply_quick
from common.runner import versions
from common.stats import Estimate
from common.tables import interval, make_console, number, print_table
from common.timing import Sample, Timing, Work, in_turns, now, rates, speed_ratios, spread
from offline.d4rl import read_d4rl, write_d4rl
from offline.datasets import make_dataset

FILES = ("stored", "derived", "gzip")
H5PY, OURS = "h5py", "read_d4rl"
SPEED_TARGET, MEMORY_TARGET = 0.5, 1.5
EPISODE = 1000
# What a process would import first; the last three, because it imports this script and what that needs.
PRELOADED = ["h5py", "scipy.stats", "torch", "tyro"]
COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")


@dataclass(frozen=True)
class Args:
    """Measure the reading of a D4RL file beside h5py's."""

    rows: int = 1_000_000
    """Rows of the file."""
    turns: int = 15
    """Turns of both readers on every file."""
    seed: int = 0
    """Seed of the numbers in the file."""
    out: Path = Path("results/offline_data")
    """Folder for summary.json."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """300,000 rows, seven turns, in results/offline_data_quick."""


QUICK: dict[str, Any] = {"rows": 300_000, "turns": 7, "out": Path("results/offline_data_quick")}


@dataclass(frozen=True)
class Row:
    """What was measured on one file; times by wall clock, ratios of speed for each pair of turns."""

    file: str
    array_bytes: int
    record_bytes: int
    h5py_ms: Estimate
    read_d4rl_ms: Estimate
    speed_cpu: Estimate
    speed_wall: Estimate
    memory: float | None


def make_files(folder: Path, rows: int, seed: int) -> None:
    """Write the three files."""
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((rows + 1, 17), np.float32)
    actions = rng.uniform(-1, 1, (rows, 6)).astype(np.float32)
    cut = np.arange(rows) % EPISODE == EPISODE - 1
    rewards = rng.standard_normal(rows, np.float32)
    arrays = (observations[:-1], actions, rewards, np.zeros(rows, bool), cut)
    write_d4rl(make_dataset(*arrays, observations[1:]), folder / "stored.hdf5")
    write_d4rl(make_dataset(*arrays), folder / "derived.hdf5")
    with h5py.File(folder / "stored.hdf5") as plain, h5py.File(folder / "gzip.hdf5", "w") as packed:
        for name in plain:
            packed.create_dataset(name, data=plain[name], compression="gzip")


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of a file, as h5py gives it."""
    with h5py.File(path) as file:
        return {name: file[name][()] for name in file}


def read_record(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the checked record of a file."""
    record = read_d4rl(path)
    return {name: getattr(record, name) for name in (*COLUMNS, "episode_index", "next_known")}


READERS = {H5PY: read_arrays, OURS: read_record}


def measure_speed(path: Path, turns: int) -> list[Sample]:
    """Both readers in turns; the first turn warms up and does not count."""

    def work(reader: str, _: int) -> tuple[float, Timing, dict[str, Any]]:
        gc.collect()
        start = now()
        found = READERS[reader](path)
        return 1.0, now() - start, {"bytes": sum(array.nbytes for array in found.values())}

    arms: dict[str, Work] = {reader: partial(work, reader) for reader in READERS}
    return [sample for sample in in_turns(path.stem, arms, [0], turns + 1) if sample.turn]


def measure_memory(path: Path, small: Path) -> float | None:
    """Bytes by which a new process grows at its peak while it reads the record; None off Linux."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(growth, path, small).result()


def growth(path: Path, small: Path) -> float | None:
    """As `measure_memory`, in this process; the small file is for what libraries load at their first use."""
    read_record(small)
    gc.collect()
    before = status_bytes("VmRSS")
    record = read_record(path)
    peak = status_bytes("VmHWM")
    del record
    return None if before is None or peak is None else peak - before


def status_bytes(field: str) -> float | None:
    """A size from the kernel's record of this process; None off Linux."""
    if sys.platform != "linux":
        return None
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1]) * 1024  # the kernel's kB are KiB
    raise RuntimeError(f"/proc/self/status has no {field}")


def make_row(samples: list[Sample], grown: float | None) -> Row:
    """The figures of one file out of its samples and the growth of a process that read it."""
    name = samples[0].case
    array_bytes, record_bytes = (
        next(s.measures["bytes"] for s in samples if s.arm == arm) for arm in (H5PY, OURS)
    )
    return Row(
        name, array_bytes, record_bytes,
        h5py_ms=spread([1000 / rate for rate in rates(samples, name, H5PY, "wall")]),
        read_d4rl_ms=spread([1000 / rate for rate in rates(samples, name, OURS, "wall")]),
        speed_cpu=spread(speed_ratios(samples, name, OURS, H5PY, "cpu")),
        speed_wall=spread(speed_ratios(samples, name, OURS, H5PY, "wall")),
        memory=None if grown is None else grown / record_bytes,
    )  # fmt: skip


def verdicts(rows: list[Row]) -> list[str]:
    """A line for each target and file, judged by the median over the turns."""
    lines = []
    for row in rows:
        met = "met" if (row.speed_cpu.value or 0) >= SPEED_TARGET else "MISSED"
        lines.append(
            f"{row.file}: speed {interval(row.speed_cpu, 2)} of h5py's by CPU time, "
            f"{interval(row.speed_wall, 2)} by wall clock, target {SPEED_TARGET:g} or more: {met}"
        )
        if row.memory is not None:
            met = "met" if row.memory <= MEMORY_TARGET else "MISSED"
            lines.append(
                f"{row.file}: memory {row.memory:.2f} times the arrays of the record, target "
                f"{MEMORY_TARGET:g} or less: {met}"
            )
    return lines


def print_rows(console: Console, args: Args, rows: list[Row]) -> None:
    """The figures as a table."""
    print_table(
        console,
        f"Reading {args.rows:,} rows, {args.turns} turns",
        ("file", "arrays, MB", "record, MB", "h5py, ms", "ours, ms", "speed, CPU", "speed, wall", "memory"),
        [
            (
                row.file, number(row.array_bytes / 1e6), number(row.record_bytes / 1e6),
                interval(row.h5py_ms, 0), interval(row.read_d4rl_ms, 0),
                interval(row.speed_cpu, 2), interval(row.speed_wall, 2), number(row.memory, 2),
            )
            for row in rows
        ],
        caption="median [smallest, largest]; speed over h5py's, memory over the record's arrays",
    )  # fmt: skip


def main(args: Args) -> int:
    """Run the benchmark and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    for name in ("rows", "turns"):
        if getattr(args, name) < 1:
            console.print(f"error: --{name} is {getattr(args, name)}, must be at least 1", style="red")
            return 2
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "small").mkdir()
        with console.status("writing files"):
            make_files(folder / "small", 10, args.seed)
            make_files(folder, args.rows, args.seed)
        for name in FILES:
            path, small = folder / f"{name}.hdf5", folder / "small" / f"{name}.hdf5"
            with console.status(f"reading {name}"):
                rows.append(make_row(measure_speed(path, args.turns), measure_memory(path, small)))
    print_rows(console, args, rows)
    lines = verdicts(rows)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    found = {"args": args, "rows": rows, "targets": lines, "versions": versions()}
    write_json(args.out / "summary.json", found)
    console.print(f"wrote {args.out / 'summary.json'}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
