"""The training loop of the offline algorithms: metrics, evaluations and checkpoints between its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import d3rlpy
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agents.files import write_json
from agents.metrics import TrainingLog
from agents.run_folder import versions
from agents.training import single_thread
from llmgym.checks import check_count
from offline.datasets import Dataset

if TYPE_CHECKING:
    from offline.algorithms import OfflineAgent

RECORDS = 200  # lines of metrics of a long run: enough for a curve

METRICS: dict[str, str] = {
    "train/loss": "loss of imitation, or of the double DQN and the CQL penalty together",
    "train/imitation_loss": "cross-entropy of the logged actions in nats (discrete BC)",
    "train/regularization_loss": "penalty on the logits (discrete BC; 0 unless beta is set)",
    "train/critic_loss": "squared Bellman error, summed over critics; with what CQL adds to it, and with "
    "IQL's value loss",
    "train/conservative_loss": "weight times the CQL penalty, in d3rlpy's form without the 1 / N of its "
    "samples, summed over critics (discrete: the penalty itself)",
    "train/td_loss": "squared Bellman error (discrete CQL)",
    "train/alpha": "Lagrange multiplier of the CQL penalty; 1 where the weight is fixed",
    "train/q_loss": "squared Bellman error of IQL's critics, summed over them",
    "train/v_loss": "expectile loss of IQL's value",
    "train/actor_loss": "loss of the policy, as the algorithm defines it",
    "train/bc_loss": "squared distance of the policy's actions to the logged ones (TD3+BC, ReBRAC)",
    "train/temp": "temperature of the entropy (SAC, CQL)",
    "train/temp_loss": "loss of that temperature",
}


def describe() -> str:
    """The definitions as a plain-text table, one metric a line; each is a mean over gradient steps."""
    width = max(map(len, METRICS))
    return "\n".join(f"{name:<{width}}  {meaning}" for name, meaning in METRICS.items())


class Means:
    """Means of the losses of gradient steps, by their names in `METRICS`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, losses: dict[str, float]) -> None:
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1  # TD3's policy moves every second step

    def take(self, step: int) -> dict[str, float]:
        """The means since the last call.

        Raises:
            FloatingPointError: one is not finite.
        """
        means = {f"train/{name}": total / self._counts[name] for name, total in self._sums.items()}
        for name, value in means.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value} before step {step}; lower the learning rates")
        self._sums.clear()
        self._counts.clear()
        return means


def fit(
    agent: OfflineAgent,
    dataset: Dataset,
    n_steps: int,
    callback: Callable[[OfflineAgent, int], Any] | None = None,
    eval_every: int | None = None,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress_bar: bool = False,
) -> list[dict[str, float]]:
    """Take gradient steps on batches drawn from a record.

    Torch's global generators are left as they were, and are everybody's own while ``callback`` runs. One
    torch thread: small networks are slower with more. Two fits with one seed give the same weights, and so
    does one that is saved and goes on, by `OfflineAgent.load` and another call or by ``resume``.

    Args:
        n_steps: of this call.
        callback: called as ``callback(agent, agent.num_steps)`` whenever the agent's number of steps is a
            multiple of ``eval_every``; for evaluations.
        run_dir: folder for ``config.json``, ``versions.json``, ``metrics.jsonl`` and TensorBoard events
            of `METRICS` against gradient steps, and ``checkpoint.pt``.
        checkpoint_every: steps between two writings of the checkpoint (behind the callback of that step,
            if there is one); there is one at the end too. It is a saved agent like any other.
        resume: first put the checkpoint of ``run_dir`` into the agent, which must be as it was made for
            the run, and take only the steps that are left. Without a checkpoint the call starts afresh.

    Returns:
        The lines of metrics that this call wrote: ``step``, and means since the line before. There are
        about 200 in a long call, and one at each evaluation and checkpoint.

    Raises:
        ValueError: nothing would be trained (``n_steps`` below 1), or evaluated or saved (``eval_every`` or
            ``checkpoint_every`` above ``n_steps``); the record does not fit the agent; a learning rate has
            a schedule that ends before this call does; a checkpoint of another run.
        FloatingPointError: a loss is not finite. The checkpoint of before stands.
    """
    check_count("n_steps", n_steps)
    agent.spaces.check_dataset(dataset)
    _check_every(n_steps, callback, eval_every, run_dir, checkpoint_every, resume)
    folder = None if run_dir is None else Path(run_dir)
    start, goes_on = _prepare(agent, n_steps, folder, checkpoint_every, resume)
    end = start + n_steps
    _check_schedules(agent, end)
    if folder is not None and not goes_on:
        _describe_run(agent, dataset, n_steps, folder)
    sampler = agent.sampler(dataset)
    log_every = max(1, n_steps // RECORDS)
    lines, means = [], Means()
    resume_at = agent.num_steps if resume else None  # lines behind it were lost with the stopped run
    with (
        single_thread(),
        TrainingLog(n_steps, folder, False, agent.num_steps - start, resume_at) as log,
        _bar(progress_bar) as bar,
    ):
        task = bar.add_task(agent.algorithm, total=n_steps, completed=agent.num_steps - start)
        while agent.num_steps < end:
            stop = _next_stop(agent.num_steps, end, start, log_every, eval_every, checkpoint_every)
            with agent.training.active():
                for _ in range(agent.num_steps, stop):
                    means.add(agent.step(sampler.sample()))
            line = means.take(stop)
            log.write_foreign(stop, stop - start, line)
            lines.append({"step": stop} | line)
            loss = line.get("train/loss", line.get("train/critic_loss", math.nan))
            bar.update(task, completed=stop - start, description=f"{agent.algorithm} loss {loss:10.4f}")
            if callback is not None and eval_every is not None and stop % eval_every == 0:
                callback(agent, stop)
            if checkpoint_every is not None and (stop % checkpoint_every == 0 or stop == end):
                assert folder is not None
                agent.save_checkpoint(folder / "checkpoint.pt", {"start": start, "n_steps": n_steps})
    return lines


def _next_stop(step: int, end: int, start: int, log_every: int, *others: int | None) -> int:
    """The next step at which something is written: multiples of the periods, and the end."""
    stops = [end, step + log_every - (step - start) % log_every]
    stops += [step + every - step % every for every in others if every is not None]
    return min(stops)


def _check_every(
    n_steps: int, callback: Any, eval_every: Any, run_dir: Any, checkpoint_every: Any, resume: bool
) -> None:
    if (callback is None) != (eval_every is None):
        raise ValueError(f"eval_every={eval_every!r}, callback={callback!r}; allowed: both, or neither")
    for name, every in (("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and check_count(name, every) > n_steps:
            raise ValueError(f"{name}={every} is more than n_steps={n_steps}: it would never come to that")
    if run_dir is None and (resume or checkpoint_every is not None):
        raise ValueError("resume and checkpoint_every need a folder: pass run_dir=")


def _prepare(
    agent: OfflineAgent, n_steps: int, folder: Path | None, checkpoint_every: int | None, resume: bool
) -> tuple[int, bool]:
    """The agent's step at which the run began, and whether this goes on with a checkpoint."""
    path = None if folder is None else folder / "checkpoint.pt"
    if path is None or not path.exists():
        return agent.num_steps, False
    if not resume:
        if checkpoint_every is not None:
            raise ValueError(f"{path} exists; pass resume=True to go on with it, or another run_dir")
        return agent.num_steps, False
    call = agent.load_checkpoint(path)
    if call["n_steps"] != n_steps:
        raise ValueError(f"n_steps={n_steps}, but {path} is of a call with n_steps={call['n_steps']}")
    return call["start"], True


def _check_schedules(agent: OfflineAgent, end: int) -> None:
    """A cosine goes up again behind its end."""
    for name, factory in vars(agent.config).items():
        length = getattr(getattr(factory, "lr_scheduler_factory", None), "T_max", end)
        if length < end:
            raise ValueError(
                f"{name} has a schedule of {length} steps, and the agent would come to {end}; make it with "
                f"total_steps={end} or more"
            )


def _describe_run(agent: OfflineAgent, dataset: Dataset, n_steps: int, folder: Path) -> None:
    about = {
        "algorithm": agent.algorithm,
        "config": json.loads(agent.config.serialize()),
        "spaces": asdict(agent.spaces),
        "seed": agent.seed,
        "n_steps": n_steps,
        "data": {"rows": len(dataset), "episodes": dataset.n_episodes},
    }
    write_json(folder / "config.json", about)
    write_json(folder / "versions.json", versions() | {"d3rlpy": d3rlpy.__version__})


def _bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("[progress.description]{task.description}"), BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"), TimeElapsedColumn(),
        TimeRemainingColumn(), disable=not shown,
    )  # fmt: skip
