"""Recording all shards of a collection, in this process or in several, and going on where it stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from typing import Any

import gymnasium as gym
import numpy as np

from agents.files import replace_file, write_json
from agents.run_folder import RunConfig, UserError, versions
from agents.runs import make_env
from offline.acting import Source
from offline.recorder import Shard, record, shards

Columns = dict[str, np.ndarray]
OnRows = Callable[[int], None]
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Plan:
    """What defines a collection: equal plans give equal rows."""

    env: str
    env_kwargs: dict[str, Any]
    sources: tuple[Source, ...]
    steps: int
    seed: int

    def rows(self) -> list[int]:
        """Rows of each policy: equal shares, the first ones one more where it does not come out even."""
        share, rest = divmod(self.steps, len(self.sources))
        return [share + (part < rest) for part in range(len(self.sources))]

    def shards(self) -> list[list[Shard]]:
        """The shards of each policy."""
        rows = enumerate(zip(self.sources, self.rows(), strict=True))
        return [shards(source, self.seed, part, n) for part, (source, n) in rows]

    def as_json(self) -> dict[str, Any]:
        """The plan without the paths of files: what is in them counts, not where they are."""
        known = [{k: v for k, v in asdict(s).items() if v is not None and k != "path"} for s in self.sources]
        return {
            "env": self.env,
            "env_kwargs": json.loads(json.dumps(self.env_kwargs, default=repr)),
            "policies": known,
            "steps": self.steps,
            "seed": self.seed,
        }


def environment(env_id: str, env_kwargs: dict[str, Any]) -> gym.Env:
    """A plain environment.

    Raises:
        UserError: unknown id, with the nearest one; arguments that it does not take.
    """
    _catch_mujoco_warnings(env_id)
    return make_env(RunConfig(env_id, env_kwargs, 1, "", {}, 0, 1), scalar=True)


def _catch_mujoco_warnings(env_id: str) -> None:
    """Show MuJoCo's warnings once, as Python's; it prints each again and writes MUJOCO_LOG.TXT."""
    spec = gym.registry.get(env_id)
    if spec is None or "mujoco" not in str(spec.entry_point) or find_spec("mujoco") is None:
        return
    import mujoco

    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(lambda text: warnings.warn(f"MuJoCo: {text}", stacklevel=2))


def record_all(plan: Plan, folder: Path, workers: int, on_rows: OnRows) -> list[Columns]:
    """The rows of each policy, as many as are its share; the last one may have neither flag.

    Args:
        folder: keeps each shard when it is finished. Those that are there already are not recorded again.
        workers: processes, at most one for each shard.
        on_rows: called now and then with the number of rows that were added.

    Raises:
        UserError: the folder holds a collection by another plan.
    """
    _claim(folder, plan)
    by_part = plan.shards()
    todo = []
    for shard in (shard for part in by_part for shard in part):
        if (folder / shard.file).exists():
            on_rows(sum(shard.quotas))
        else:
            todo.append(shard)
    work = partial(_record_shard, plan.env, plan.env_kwargs, folder)
    if min(workers, len(todo)) <= 1:
        for shard in todo:
            work(shard, on_rows)
    else:
        _in_processes(work, todo, min(workers, len(todo)), on_rows)
    return [_joined(folder, part, rows) for part, rows in zip(by_part, plan.rows(), strict=True)]


def _claim(folder: Path, plan: Plan) -> None:
    """Write down the plan, or check that it is the one that the folder was begun with."""
    file, now = folder / "plan.json", plan.as_json()
    if not file.exists():
        write_json(file, now | {"versions": versions()})
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    began_on = before.pop("versions")
    if before != now:
        changed = ", ".join(f"{k}={before.get(k)!r}" for k in now if before.get(k) != now[k])
        raise UserError(
            f"{folder} holds the beginning of another collection, with {changed}; continue that one, or "
            "delete the folder"
        )
    other = [f"{k} {began_on.get(k)} -> {v}" for k, v in versions().items() if began_on.get(k) != v]
    if other:
        warnings.warn(f"this collection began on other versions: {', '.join(other)}", stacklevel=2)


def _record_shard(
    env_id: str, env_kwargs: dict[str, Any], folder: Path, shard: Shard, on_rows: OnRows
) -> None:
    make = partial(environment, env_id, env_kwargs)
    with ExitStack() as stack:
        if shard.source.kind in ("agent", "replay"):  # the others do without torch, slow to import
            from agents.training import single_thread

            stack.enter_context(single_thread())
        if shard.source.kind == "replay":
            from offline.replay import record_replay

            training = folder / f"{shard.part}-training"
            columns = record_replay(make(), shard.quotas[0], shard.seed, training, on_rows)
        else:
            columns = record(shard, make, on_rows)
    with replace_file(folder / shard.file, "wb") as file:
        np.savez(file, **columns)  # type: ignore[arg-type]


def _joined(folder: Path, part: list[Shard], rows: int) -> Columns:
    """The first ``rows`` rows of the shards: whole episodes made them more."""
    pieces: dict[str, list[np.ndarray]] = {}
    for shard in part:
        with np.load(folder / shard.file, allow_pickle=False) as arrays:
            for name in arrays.files:
                pieces.setdefault(name, []).append(arrays[name])
    # Column after column, so that no more than one is in memory twice.
    return {name: np.concatenate(pieces.pop(name))[:rows] for name in list(pieces)}


# --------------------------------------------------------------------------- processes

_counter: Any = None  # in a worker process: the rows that all of them have recorded


def _in_processes(
    work: Callable[[Shard, OnRows], None], todo: list[Shard], workers: int, on_rows: OnRows
) -> None:
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    for name in ONE_THREAD:  # inherited; more threads would only take each other's cores
        os.environ.setdefault(name, "1")
    pool = ProcessPoolExecutor(workers, context, _begin, (counter,))
    try:
        running, reported = {pool.submit(_run, work, shard) for shard in todo}, 0
        while running:
            done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            total = counter.value
            on_rows(total - reported)
            reported = total
            for future in done:
                future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(counter: Any) -> None:
    """What a worker process does first."""
    global _counter
    _counter = counter
    signal(SIGINT, SIG_DFL)  # ends at Ctrl-C without a traceback
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A collection whose parent is killed must not go on writing under the next one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _run(work: Callable[[Shard, OnRows], None], shard: Shard) -> None:
    def add(rows: int) -> None:
        with _counter.get_lock():
            _counter.value += rows

    work(shard, add)
