"""The record of logged data: one row is one transition, and every reader and writer meets here.

`make_dataset` is the only way in, and the only place where data is checked. What comes out of it is safe
to train on: equal lengths, finite numbers, one end per episode, and no successor that nobody observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offline.checks import (
    as_actions, as_column, as_flags, as_info, as_next, as_numbers, check_bounds, check_finite, chunks,
)  # fmt: skip

ROW_FIELDS = (
    "observations", "actions", "rewards", "next_observations", "terminals", "timeouts", "next_known",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Transitions in the order in which they were logged, episode after episode.

    ===================  ==========  =================================================================
    field                shape       meaning
    ===================  ==========  =================================================================
    observations         [n, ...]    as logged: any real dtype
    actions              [n, A]      float, of a Box; or [n] int64, of a Discrete
    rewards              [n]         float32
    next_observations    [n, ...]    the observation that followed, also at a terminal or timeout row;
                                     the row's own observation, as a placeholder, where it is not known
    terminals            [n]         bool: the episode ended there, and the next value is zero
    timeouts             [n]         bool: the log was cut there, and the next value is that of
                                     next_observations; never together with terminals
    episode_index        [n]         int64, 0, 0, 0, 1, 1, ...; an episode ends where either flag is set
    metadata                         what JSON can hold: environment, policy, seed, versions,
                                     action_low and action_high; beside that, arrays that a file came with
    infos                {key: [n,   further arrays of each row, such as "behaviour_logp" or "qpos";
                         ...]}       they may hold NaN
    next_known           [n]         bool: next_observations holds what followed. False is possible in the
                                     last row of an episode only
    ===================  ==========  =================================================================

    Every row counts in an episode's return and length, and its state and action may be imitated. Only
    `trainable` rows are transitions that a value may be learned from: not a timeout of which the next
    observation was never stored. A conversion into another library's transitions keeps every timeout
    that is trainable, with its real next observation, and leaves out or masks the others.

    Build it with `make_dataset`.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: np.ndarray
    terminals: np.ndarray
    timeouts: np.ndarray
    episode_index: np.ndarray
    metadata: dict[str, Any] = field(default_factory=dict)
    infos: dict[str, np.ndarray] = field(default_factory=dict)
    next_known: np.ndarray = None  # type: ignore[assignment]  # all True, see below

    def __post_init__(self) -> None:
        if self.next_known is None:
            object.__setattr__(self, "next_known", np.ones(len(self.rewards), bool))

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        shapes = (f"{x.dtype}{list(x.shape[1:])}" for x in (self.observations, self.actions))
        observation, action = shapes
        rows = f"{len(self)} rows in {self.n_episodes} episodes"
        return f"<Dataset: {rows}, observations {observation}, actions {action}>"

    @property
    def n_episodes(self) -> int:
        """Number of episodes, a last one without an end included."""
        return int(self.episode_index[-1]) + 1

    @property
    def trainable(self) -> np.ndarray:
        """bool [n]: the next observation is known, or not needed because the row is terminal."""
        return self.next_known | self.terminals

    @property
    def discrete(self) -> bool:
        """Whether actions are numbers of a choice instead of vectors."""
        return self.actions.dtype.kind == "i"


# --------------------------------------------------------------------------- the way in


def make_dataset(
    observations: ArrayLike,
    actions: ArrayLike,
    rewards: ArrayLike,
    terminals: ArrayLike,
    timeouts: ArrayLike | None = None,
    next_observations: ArrayLike | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    infos: Mapping[str, ArrayLike] | None = None,
    action_low: ArrayLike | None = None,
    action_high: ArrayLike | None = None,
) -> Dataset:
    """Check logged rows and make a record of them. Arrays of the right dtype are not copied.

    What is put right instead of refused:

    - a row with both flags is terminal, and no timeout (nothing is bootstrapped behind a terminal);
    - a last row without a flag is a timeout: the log ended there, the episode did not;
    - without ``next_observations`` they are the observation of the following row within an episode, and
      unknown in the last row of one (see `Dataset.next_known`). No row is dropped for that. A terminal
      row is a full transition all the same; a timeout counts in its episode's return, but is not
      `trainable`. D4RL's ``qlearning_dataset`` drops both kinds of rows that it cannot complete.

    Actions of a float dtype are continuous, whatever their values; those of an integer dtype are discrete.

    Args:
        observations: [n, ...], real numbers.
        actions: [n, A] or [n], float; or [n] or [n, 1], integer.
        rewards: [n] or [n, 1]; kept as float32.
        terminals: [n] or [n, 1], bool, or numbers 0 and 1.
        timeouts: likewise; none if not given.
        next_observations: as observations, if they were stored.
        metadata: what describes the data; ``action_low`` and ``action_high`` are taken from it if the
            arguments are not given.
        infos: further arrays [n, ...] by name.
        action_low, action_high: bounds, a number or [A], both included; no bounds if not given.

    Raises:
        ValueError: no rows; arrays of different lengths or of unusable shapes or dtypes; NaN, infinity or
            an action outside its bounds, with field and row; a flag other than 0 and 1.
    """
    about = dict(metadata or {})
    states = as_numbers("observations", observations)
    if not len(states):
        raise ValueError("observations: got no rows; allowed: at least one transition")
    n = len(states)
    moves = as_actions(actions, n)
    gains = as_column("rewards", as_numbers("rewards", rewards), n)
    with np.errstate(over="ignore"):  # too large for float32: found below, as an infinity
        gains = gains.astype(np.float32, copy=False)
    terminal = as_flags("terminals", terminals, n)
    timeout = np.zeros(n, bool) if timeouts is None else as_flags("timeouts", timeouts, n) & ~terminal
    if not terminal[-1]:
        timeout[-1] = True
    ends = terminal | timeout
    for name, array in (("observations", states), ("actions", moves), ("rewards", gains)):
        check_finite(name, array)
    about |= check_bounds(moves, about, action_low, action_high)
    if next_observations is None:
        following, known = _shifted(states, ends), ~ends
    else:
        following, known = as_next(next_observations, states), np.ones(n, bool)
    return Dataset(
        states, moves, gains, following, terminal, timeout, np.cumsum(ends) - ends, about,
        {name: as_info(name, values, n) for name, values in (infos or {}).items()}, known,
    )  # fmt: skip


def _shifted(observations: np.ndarray, ends: np.ndarray) -> np.ndarray:
    following = np.empty_like(observations)
    following[:-1] = observations[1:]
    following[ends] = observations[ends]
    return following


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
