"""Worker processes for expressions, from the caller's side.

The workers are new interpreters (no fork of the caller, so its threads, locks and accelerators are left
alone), started when the first expression is met and closed at exit. They are plain subprocesses, so that a
caller which is itself a worker (even a daemonic one) can have them, and no signals are used here: a
worker's own timer ends a job, and one that is not heard of `GRACE` seconds later is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

START_LIMIT = 120.0  # seconds until a new worker is ready, on a machine that is busy
GRACE = 5.0
MAX_WORKERS = max(1, min(4, (os.cpu_count() or 1)))
ROOT = str(Path(__file__).resolve().parents[2])
COMMAND = (sys.executable, "-P", "-m", "llmgym.verifiers.worker")
NEEDED = ("sympy", "latex2sympy2_extended")


class WorkerDied(Exception):
    """The worker ended."""


class WorkerSilent(WorkerDied):
    """The worker did not answer in time."""


class Worker:
    """One worker process; used by one thread at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is the caller's; and its children can be killed as a group
        )
        self.ready = False

    def ask(self, answer: str, truth: str, seconds: float) -> str:
        """The status of one job. Raises WorkerDied."""
        if not self.ready:
            if self.read_line(START_LIMIT) != "ready":
                raise WorkerDied("it did not start")
            self.ready = True
        line = json.dumps({"answer": answer, "truth": truth, "seconds": seconds}) + "\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerDied("it ended") from error
        return self.read_line(seconds + GRACE)

    def read_line(self, seconds: float) -> str:
        """What the worker says next. Raises WorkerDied."""
        assert self.process.stdout is not None
        line, deadline = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise WorkerSilent("it did not answer")
            chunk = os.read(self.process.stdout.fileno(), 4096)
            if not chunk:
                raise WorkerDied("it ended")
            line += chunk
        return line.decode().strip()

    def close(self) -> None:
        """End the process and its child."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what is left in a buffer has no reader any more
                if stream is not None:
                    stream.close()


class Pool:
    """Up to `size` workers, lent to the threads that ask."""

    def __init__(self, size: int) -> None:
        self.places = threading.BoundedSemaphore(size)
        self.lock = threading.Lock()
        self.idle: list[Worker] = []
        self.all: set[Worker] = set()

    def ask(self, answer: str, truth: str, seconds: float) -> str:
        """The status of one job. A worker that does not answer is ended, and the job has timed out; one that
        has ended by itself is replaced, once, for the fault need not be this job's."""
        with self.places:
            for last_try in (False, True):
                with self.lock:
                    worker = self.idle.pop() if self.idle else Worker()
                    self.all.add(worker)
                try:
                    status = worker.ask(answer, truth, seconds)
                except BaseException as error:
                    self.end(worker)
                    if not isinstance(error, WorkerDied):
                        raise
                    if not worker.ready:
                        raise RuntimeError(
                            f"the process for expressions failed: {' '.join(COMMAND)}"
                        ) from error
                    if isinstance(error, WorkerSilent):
                        return "timed_out"
                    if last_try:
                        return "over_limits"
                else:
                    with self.lock:
                        self.idle.append(worker)
                    return status
        raise AssertionError("unreachable")

    def end(self, worker: Worker) -> None:
        """End one worker."""
        with self.lock:
            self.all.discard(worker)
        worker.close()

    def close(self) -> None:
        """End all workers."""
        with self.lock:
            workers, self.all, self.idle = list(self.all), set(), []
        for worker in workers:
            worker.close()


_pool: Pool | None = None
_pool_lock = threading.Lock()
_warned = False


def pool() -> Pool:
    """This process's pool."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Pool(MAX_WORKERS)
        return _pool


def close() -> None:
    """End this process's workers; the next expression starts new ones."""
    global _pool
    with _pool_lock:
        old, _pool = _pool, None
    if old is not None:
        old.close()


def _forget() -> None:
    """In a fork of this process: its workers belong to the parent."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def missing() -> list[str]:
    """The packages for expressions that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def grade_expressions(pairs: Sequence[tuple[str, str]], seconds: float) -> list[str]:
    """The status of each (answer, truth), every pair within `seconds`; neighbours run at the same time."""
    global _warned
    absent = missing()
    if absent:
        if not _warned:
            warnings.warn(
                f"answers that are expressions need {' and '.join(absent)}: pip install llmgym[llm]",
                stacklevel=3,
            )
            _warned = True
        return ["needs_extra"] * len(pairs)
    results = [""] * len(pairs)
    rows = iter(range(len(pairs)))
    lock = threading.Lock()
    errors: list[Exception] = []

    def work() -> None:
        while not errors:
            with lock:
                row = next(rows, None)
            if row is None:
                return
            try:
                results[row] = pool().ask(*pairs[row], seconds)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(MAX_WORKERS, len(pairs)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
