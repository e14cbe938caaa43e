"""Logged data: the record, its episodes, parts of it, and the scales that learners need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offline.checks import chunks
from offline.record import Dataset, make_dataset

__all__ = [
    "Dataset", "concatenate", "episode_lengths", "episode_returns", "episode_slices", "episode_starts",
    "make_dataset", "observation_statistics", "scale_rewards_by_return_range", "split", "take",
]  # fmt: skip

ROW_FIELDS = (
    "observations", "actions", "rewards", "next_observations", "terminals", "timeouts", "next_known",
)  # fmt: skip

# --------------------------------------------------------------------------- episodes


def episode_starts(dataset: Dataset) -> np.ndarray:
    """int64 [n_episodes], the first row of each episode."""
    return np.flatnonzero(np.diff(dataset.episode_index, prepend=-1))


def episode_slices(dataset: Dataset) -> list[slice]:
    """The rows of each episode."""
    starts = episode_starts(dataset).tolist()
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(dataset)], strict=True)]


def episode_lengths(dataset: Dataset) -> np.ndarray:
    """int64 [n_episodes], number of rows."""
    return np.bincount(dataset.episode_index)


def episode_returns(dataset: Dataset) -> np.ndarray:
    """float64 [n_episodes], undiscounted sums of all rewards, that of a timeout row included."""
    return np.bincount(dataset.episode_index, weights=dataset.rewards)


def take(dataset: Dataset, rows: ArrayLike) -> Dataset:
    """The given rows, in the given order; next observations are kept.

    A row whose successor is not the following row of the result ends an episode there: as a timeout,
    unless it is terminal. Learning from the row is not changed by that; episode returns are.

    Args:
        rows: numbers from 0, or a mask bool [n].

    Raises:
        ValueError: no rows; a number outside the data; a mask of another length.
    """
    index = np.asarray(rows)
    n = len(dataset)
    if index.dtype == bool and index.shape == (n,):
        index = np.flatnonzero(index)
    if index.ndim != 1 or not index.size or index.dtype.kind not in "iu":
        given = f"{index.dtype} of shape {index.shape}"
        raise ValueError(f"rows: got {given}; allowed: at least one row number, or bool ({n},)")
    if index.min() < 0 or index.max() >= n:
        raise ValueError(f"rows: got {index.min()} to {index.max()}; allowed: 0 to {n - 1}")
    columns = {name: getattr(dataset, name)[index] for name in ROW_FIELDS}
    goes_on = np.diff(index) == 1
    goes_on &= np.diff(dataset.episode_index[index]) == 0
    ends = np.append(~goes_on, True)
    columns["timeouts"] = ends & ~columns["terminals"]
    infos = {name: values[index] for name, values in dataset.infos.items()}
    return Dataset(**columns, episode_index=np.cumsum(ends) - ends, metadata=dataset.metadata, infos=infos)


def split(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Two parts of whole episodes, drawn at random: ``fraction`` of the episodes, and the others.

    Each part has at least one episode; within a part they stay in order.

    Raises:
        ValueError: ``fraction`` is not between 0 and 1; there is one episode only.
    """
    n = dataset.n_episodes
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction!r} must be above 0 and below 1")
    if n < 2:
        raise ValueError(f"the data has {n} episode; allowed: at least 2, one for each part")
    count = min(max(round(fraction * n), 1), n - 1)
    chosen = np.zeros(n, bool)
    chosen[np.random.default_rng(seed).permutation(n)[:count]] = True
    rows = chosen[dataset.episode_index]
    return take(dataset, rows), take(dataset, ~rows)


def concatenate(datasets: Sequence[Dataset]) -> Dataset:
    """Records one after the other; episodes are numbered through.

    Metadata that all have in common stays as it is; where they differ, the metadata of each is listed
    under "parts".

    Raises:
        ValueError: no record; shapes, dtypes or infos differ.
    """
    if not datasets:
        raise ValueError("datasets: got none; allowed: at least one")
    first = datasets[0]
    if len(datasets) == 1:
        return first
    for number, other in enumerate(datasets[1:], start=1):
        for name in ("observations", "actions"):
            a, b = getattr(first, name), getattr(other, name)
            if (a.dtype, a.shape[1:]) != (b.dtype, b.shape[1:]):
                raise ValueError(
                    f"{name} of record {number} are {b.dtype} of shape {b.shape}; allowed: as in record 0, "
                    f"{a.dtype} of shape {a.shape}"
                )
        if other.infos.keys() != first.infos.keys():
            raise ValueError(
                f"infos of record {number} are {sorted(other.infos)}; allowed: as in record 0, "
                f"{sorted(first.infos)}"
            )
    columns = {name: np.concatenate([getattr(d, name) for d in datasets]) for name in ROW_FIELDS}
    starts = np.cumsum([0, *(d.n_episodes for d in datasets)])
    index = [d.episode_index + start for d, start in zip(datasets, starts, strict=False)]
    return Dataset(
        **columns,
        episode_index=np.concatenate(index),
        metadata=_common([d.metadata for d in datasets]),
        infos={name: np.concatenate([d.infos[name] for d in datasets]) for name in first.infos},
    )


def _common(all_metadata: list[dict[str, Any]]) -> dict[str, Any]:
    first = all_metadata[0]
    if all(_equal(first, other) for other in all_metadata[1:]):
        return first
    common = {k: v for k, v in first.items() if all(k in m and _equal(m[k], v) for m in all_metadata)}
    return common | {"parts": all_metadata}


def _equal(a: Any, b: Any) -> bool:
    """Equality of metadata, in which arrays may occur."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and np.array_equal(a, b)


# --------------------------------------------------------------------------- scales


def observation_statistics(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each component over all rows, float64 [...] each.

    Every row counts once, however long its episode is.
    """
    n = len(dataset)
    parts = [dataset.observations[part] for part in chunks(n)]
    mean = np.asarray(sum(part.sum(axis=0, dtype=np.float64) for part in parts) / n)
    return mean, np.sqrt(sum(np.square(part - mean).sum(axis=0) for part in parts) / n)


def scale_rewards_by_return_range(dataset: Dataset) -> Dataset:
    """Rewards as ``r / (largest return - smallest return) * 1000``.

    This is what IQL's authors do to the rewards of D4RL's locomotion data (Kostrikov et al. 2021, in
    their code).

    Raises:
        ValueError: all episodes have the same return.
    """
    returns = episode_returns(dataset)
    spread = returns.max() - returns.min()
    if spread == 0:
        raise ValueError(
            f"all {len(returns)} episodes have the return {returns[0]:g}: there is no range to scale by"
        )
    return replace(dataset, rewards=(dataset.rewards / spread * 1000).astype(np.float32))
