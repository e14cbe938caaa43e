"""The record of logged data: one row is one transition, and every reader and writer meets here.

`make_dataset` is the only way in, and the only place where data is checked. What comes out of it is safe
to train on: equal lengths, finite numbers, one end per episode, and no successor that nobody observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offline.checks import (
    as_actions,
    as_column,
    as_flags,
    as_info,
    as_next,
    as_numbers,
    check_bounds,
    check_finite,
)


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
    clip_actions: bool = False,
    next_known: ArrayLike | None = None,
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
        clip_actions: bring actions outside the bounds onto them, with a warning, instead of refusing them.
        next_known: [n], which of ``next_observations`` are real; all of them if not given. The others may
            hold anything, and can only be in the last row of an episode.

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
    low, high = (
        about.get(name) if given is None else given
        for name, given in (("action_low", action_low), ("action_high", action_high))
    )
    if low is not None or high is not None:
        moves, lowest, highest = check_bounds(moves, low, high, clip_actions)
        about |= {"action_low": lowest.tolist(), "action_high": highest.tolist()}
    if next_observations is None:
        following, known = _shifted(states, ends), ~ends
    else:
        following, known = as_next(next_observations, states), np.ones(n, bool)
        if next_known is not None:
            known = as_flags("next_known", next_known, n)
            following = _with_placeholders(following, states, known, ends)
        check_finite("next_observations", following)
    episode = np.cumsum(ends)
    episode -= ends  # in place: an end belongs to its own episode
    return Dataset(
        states, moves, gains, following, terminal, timeout, episode, about,
        {name: as_info(name, values, n) for name, values in (infos or {}).items()}, known,
    )  # fmt: skip


def _shifted(observations: np.ndarray, ends: np.ndarray) -> np.ndarray:
    following = np.empty_like(observations)
    following[:-1] = observations[1:]
    following[ends] = observations[ends]
    return following


def _with_placeholders(
    following: np.ndarray, observations: np.ndarray, known: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    wrong = np.flatnonzero(~known & ~ends)
    if len(wrong):
        raise ValueError(
            f"next_known: row {wrong[0]} has False; allowed: True within an episode, whose following row has "
            "the next observation"
        )
    if known.all():
        return following
    following = following.copy()
    following[~known] = observations[~known]
    return following
