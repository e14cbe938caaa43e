"""The life of a worker process of `common.runner`."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.files import write_json

RunFunction = Callable[[dict[str, Any], Path], dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """One run: the name of its folder and its config, which is JSON.

    `config["seed"]`, where there is one, also seeds the global generators of Python, numpy and
    torch, so that a run's numbers do not depend on those before it in the same process.
    """

    name: str
    config: dict[str, Any]


def work(
    connection: Connection, function: RunFunction, out: Path, now: dict[str, str | None]
) -> None:
    """Life of a worker process: a job in, None or a traceback back, until the pipe closes."""
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_run(function, job, out / job.name, now))


def _exit_with_parent() -> None:
    """A sweep whose parent is killed must not go on writing under the next one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(function: RunFunction, job: Job, folder: Path, now: dict[str, str | None]) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("result.json", "error.txt"):  # the result first: it vouches for the config
            (folder / name).unlink(missing_ok=True)
        write_json(folder / "config.json", job.config)
        _redirect_output(folder / "output.txt")
        _seed_globals(job.config.get("seed", 0))
        started = time.perf_counter()
        result = function(job.config, folder)
        seconds = time.perf_counter() - started
        write_json(folder / "result.json", {"result": result, "seconds": seconds, "versions": now})
        return None
    except (Exception, SystemExit):
        error = traceback.format_exc()
        (folder / "error.txt").write_text(error)
        return error
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _redirect_output(path: Path) -> None:
    """Send all this process prints, native code included, to the file and off the progress bar."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
