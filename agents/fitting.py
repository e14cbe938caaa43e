"""Training on a fixed data set: what SFT, the reward model and DPO share.

    data --> n_epochs x shuffled minibatches --> loss --> one gradient step each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from agents import training
from agents.metrics import TrainingLog
from agents.schedules import schedule

RECORDS = 200  # lines of metrics of a long run: enough for a curve


D = TypeVar("D", bound=training.Data)
Loss = Callable[[D], tuple[Tensor, Mapping[str, Tensor | float]]]


class FitConfig(Protocol):
    """Fields that the configuration of every such trainer has."""

    @property
    def learning_rate(self) -> float | str: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def n_epochs(self) -> int: ...
    @property
    def max_grad_norm(self) -> float | None: ...


def check_fit_config(config: FitConfig) -> None:
    """Raise ValueError, naming field and value, unless the fields of `FitConfig` are allowed."""
    training.check_fields(config, batch_size="integer >= 1", n_epochs="integer >= 1", max_grad_norm="> 0")
    schedule(config.learning_rate, "learning_rate")


class Means:
    """Means of metrics over the rows of several parts."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._rows = 0

    def add(self, metrics: Mapping[str, Tensor | float], rows: int) -> None:
        """Count the metrics of a part, which are means over its rows."""
        self._rows += rows
        for name, x in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(x) * rows

    def result(self) -> dict[str, float]:
        """The means over all rows."""
        return {name: x / self._rows for name, x in self._sums.items()}


def step(
    part: D, loss: Loss[D], optimizer: training.FlatAdam, max_grad_norm: float | None, means: Means
) -> None:
    """One gradient step on a part of the data; its metrics go into ``means``."""
    value, metrics = loss(part)
    grad_norm = training.gradient_step(value, optimizer, max_grad_norm)
    means.add({**metrics, "train/grad_norm": grad_norm}, len(part))


def fit(
    data: D,
    loss: Loss[D],
    optimizer: training.FlatAdam,
    config: FitConfig,
    generator: torch.Generator,
    n_updates: int = 0,
    run_dir: str | Path | None = None,
    progress_bar: bool = False,
) -> list[dict[str, float]]:
    """Minimise a loss over the rows of ``data``.

    Args:
        loss: of a part of the data; returns its mean, with gradient, and metrics (means over its rows).
        n_updates: gradient steps taken before this call, from which the steps are counted on.
        run_dir: folder for ``metrics.jsonl`` and TensorBoard events; their steps are gradient steps.

    Returns:
        The lines of ``metrics.jsonl``: means since the line before, at most about 200 in all.

    Raises:
        ValueError: there are no rows.
    """
    if not len(data):
        raise ValueError("the data has no rows; there is nothing to fit")
    total = config.n_epochs * math.ceil(len(data) / config.batch_size)
    every = max(1, total // RECORDS)
    rate = schedule(config.learning_rate)
    parts = (
        part
        for _ in range(config.n_epochs)
        for part in training.minibatches(data, config.batch_size, generator)
    )
    lines: list[dict[str, float]] = []
    means = Means()
    with training.single_thread(), TrainingLog(total, run_dir, progress_bar) as log:
        for done, part in enumerate(parts, start=1):
            learning_rate = rate(1.0 - (done - 1) / total)
            training.set_learning_rate(optimizer, learning_rate)
            step(part, loss, optimizer, config.max_grad_norm, means)
            if done % every == 0 or done == total:
                line = means.result()
                line |= {"train/learning_rate": learning_rate, "train/n_updates": n_updates + done}
                log.write(n_updates + done, done, line)
                lines.append(line)
                means = Means()
    return lines


def evaluate(data: D, loss: Loss[D], batch_size: int) -> dict[str, float]:
    """The metrics of a loss over all rows, such as held-out ones, without a gradient.

    Raises:
        ValueError: there are no rows.
    """
    if not len(data):
        raise ValueError("the data has no rows; there is nothing to evaluate")
    means = Means()
    with training.single_thread(), torch.no_grad():
        for part in training.minibatches(data, batch_size, None):
            means.add(loss(part)[1], len(part))
    return means.result()
