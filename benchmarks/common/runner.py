"""Runs of a benchmark in separate single-threaded processes, each with a folder of its own.

A run's folder holds `config.json`, whatever the run writes, `output.txt` (what it printed) and
`result.json`, which is written last and whole. A result beside an equal config means that the run
is done, so a sweep that was stopped, in whatever way, continues where it was.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from common.files import read_json, to_plain
from common.worker import Job, RunFunction, work

PACKAGES = ("torch", "gymnasium", "numpy", "stable_baselines3", "llmgym")
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its result, or the traceback of its failure."""

    job: Job
    folder: Path
    result: dict[str, Any] | None
    error: str | None = None


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str | None]:
    """Versions of Python, the packages that decide the numbers, and the git commit."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    try:
        found["commit"] = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["commit"] = None
    return found


def run_jobs(
    function: RunFunction,
    jobs: Sequence[Job],
    out: Path,
    workers: int | None = None,
    title: str = "runs",
    console: Console | None = None,
) -> list[Outcome]:
    """Run ``function(config, folder) -> result`` for every job that is not done yet.

    `function` is defined at the top level of a module, for worker processes import it by name.
    Its result becomes JSON. Runs are in ``out / job.name``; `workers` defaults to the cores. A run
    that raises, or whose process dies, is an `Outcome` with an error, is kept as `error.txt` in its
    folder, and costs no other run; the next call tries it again. On KeyboardInterrupt the runs
    under way are stopped, and finished ones stay. Outcomes are in the order of `jobs`.
    """
    console = console or Console()
    workers = available_cores() if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers is {workers}, must be at least 1")
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two jobs have the same name: {', '.join(twice)}")
    if "<" in function.__qualname__:  # <lambda>, <locals>
        raise ValueError(f"{function.__qualname__} cannot be imported by name in another process")

    now = versions()
    outcomes: dict[str, Outcome] = {}
    other_versions = 0
    for job in jobs:
        folder = out / job.name
        record = read_json(folder / "result.json")
        if record is not None and read_json(folder / "config.json") == to_plain(job.config):
            outcomes[job.name] = Outcome(job, folder, record["result"])
            other_versions += record["versions"] != now
    if outcomes:
        console.print(f"{len(outcomes)} of {len(jobs)} {title} were done before, in {out}")
    if other_versions:
        console.print(
            f"[yellow]{other_versions} of them ran on other versions of the code or the packages"
            " (result.json says which); delete their folders to run them again[/yellow]"
        )

    todo = [job for job in jobs if job.name not in outcomes]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    failed = 0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=len(jobs), completed=len(outcomes))
        with closing(_run_all(function, todo, out, min(workers, len(todo)), now)) as ended:
            for outcome in ended:
                outcomes[outcome.job.name] = outcome
                failed += outcome.error is not None
                text = f"{title}, {failed} failed" if failed else title
                progress.update(bar, advance=1, description=text)
    return [outcomes[name] for name in names]


def report_failures(outcomes: Sequence[Outcome], console: Console) -> int:
    """Print the config and traceback of every failed run; their number."""
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failures:
        console.print(f"[bold red]failed: {outcome.folder}[/bold red]")
        console.print(json.dumps(to_plain(outcome.job.config)), markup=False, highlight=False)
        console.print(outcome.error, markup=False, highlight=False)
    return len(failures)


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    job: Job


def _run_all(
    function: RunFunction, jobs: list[Job], out: Path, n_workers: int, now: dict[str, str | None]
) -> Generator[Outcome, None, None]:
    """Outcomes of the jobs as they end. Workers live on between jobs: imports take seconds."""
    waiting = list(reversed(jobs))
    workers = []
    try:
        workers = [_start(function, out, now, waiting.pop()) for _ in range(n_workers)]
        while workers:
            for ready in wait([worker.connection for worker in workers]):
                worker = next(w for w in workers if w.connection is ready)
                job, folder = worker.job, out / worker.job.name
                try:
                    error = worker.connection.recv()
                    alive = True
                except (EOFError, ConnectionResetError):  # killed, or died in native code
                    error, alive = _epitaph(worker.process, folder), False
                if error is None:
                    yield Outcome(job, folder, read_json(folder / "result.json")["result"])
                else:
                    yield Outcome(job, folder, None, error)
                if alive and waiting:
                    worker.job = waiting.pop()
                    worker.connection.send(worker.job)
                else:
                    worker.connection.close()  # a living worker ends at this
                    worker.process.join()
                    workers.remove(worker)
                    if waiting:
                        workers.append(_start(function, out, now, waiting.pop()))
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()


def _start(function: RunFunction, out: Path, now: dict[str, str | None], job: Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, function, out, now), daemon=True)
    with _environment(ONE_THREAD), _interrupts_ignored():  # both are inherited at the start
        process.start()
    theirs.close()  # so that the death of the worker is the end of the pipe
    ours.send(job)
    return _Worker(process, ours, job)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C goes to every process of the terminal; only the parent is to answer it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _epitaph(process: BaseProcess, folder: Path) -> str:
    process.join()
    output = folder / "output.txt"
    tail = output.read_text(errors="replace")[-2000:] if output.exists() else ""
    error = f"the process died with exit code {process.exitcode}\n{tail}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").write_text(error)
    return error
