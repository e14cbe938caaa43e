"""Native vector environments: the three autoreset modes, written once for all environments.

The modes follow Gymnasium (https://farama.org/Vector-Autoreset-Mode), whose enumeration exists
from version 1.1 on; what they do here is the same on every version:

| mode | the step that ends a row's episode | the following step |
|---|---|---|
| next-step | returns the final observation | ignores the action; reward 0, observation and info of the reset |
| same-step | returns the observation and info of the reset; ``info["final_obs"]``, ``info["final_info"]`` hold the final ones | is an ordinary step |
| disabled | returns the final observation | the row waits: action ignored, reward 0, same flags, no info |

In disabled mode `reset(options={"reset_mask": bool[N]})` restarts the rows of the mask.
"""  # noqa: E501 (a table row cannot be wrapped)

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from llmgym.checks import as_actions, as_reset_mask, as_task_ids, check_options
from llmgym.row_random import FloatArray, IntArray, RowRandom, row_seeds
from llmgym.transition import BatchedTransition, BoolArray, RowInfo, is_shared

if TYPE_CHECKING or not hasattr(gym.vector, "AutoresetMode"):

    class AutoresetMode(Enum):
        """When a finished row starts anew: Gymnasium's enumeration, for versions without it."""

        NEXT_STEP = "NextStep"
        SAME_STEP = "SameStep"
        DISABLED = "Disabled"

else:
    from gymnasium.vector import AutoresetMode


def as_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """The mode of that name ("same_step"), value ("SameStep"), or the mode itself.

    Raises:
        ValueError: no such mode.
    """
    text = mode.value if isinstance(mode, Enum) else mode
    for known in AutoresetMode:
        if text in (known.value, known.name.lower(), known.name):
            return known
    allowed = ", ".join(repr(known.name.lower()) for known in AutoresetMode)
    raise ValueError(f"autoreset_mode: got {mode!r}; allowed: {allowed}")


def autoreset_mode(env: gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The mode an environment declares in its metadata, also through wrappers.

    Next-step where nothing is declared: it is the only mode of Gymnasium 1.0, which has no
    declaration.
    """
    for layer in (env, env.unwrapped):
        mode = (layer.metadata or {}).get("autoreset_mode")
        if mode is not None:
            return as_autoreset_mode(mode)
    return AutoresetMode.NEXT_STEP


class BatchVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A native vector environment over a batched transition.

    ``np_random`` and ``np_random_seed`` are tuples with one entry per row, as SyncVectorEnv's.

    Args:
        transition: the dynamics, with `num_envs` rows.
        num_envs: number of rows N, at least 1.
        autoreset_mode: an `AutoresetMode`, or "next_step", "same_step", "disabled".
    """

    def __init__(
        self, transition: BatchedTransition, num_envs: int, autoreset_mode: AutoresetMode | str
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {"render_modes": [], "autoreset_mode": as_autoreset_mode(autoreset_mode)}
        self.single_observation_space = transition.observation_space
        self.single_action_space = transition.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._transition = transition
        self._random = RowRandom(num_envs)
        self._all_rows = np.arange(num_envs)
        self._started = False
        self._terminated = np.zeros(num_envs, dtype=np.bool_)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        return tuple(self._random.generator(row) for row in range(self.num_envs))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._random.seed_of(row) for row in range(self.num_envs))

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[NDArray[Any] | tuple[str, ...], dict[str, Any]]:
        """Start episodes in all rows, or in those of a mask.

        Args:
            seed: s seeds row i with s + i; a list gives each row its seed; None, also as an entry,
                leaves the random stream running.
            options: ``"task_id"``, an int for all rows or integers [N] (entries of rows that are
                not reset are ignored); ``"reset_mask"``, bool [N], the rows to reset.

        Returns:
            Observations of all rows, and the info of the rows that were reset.

        Raises:
            ValueError, TypeError: an argument of the wrong shape, type or range, or an unknown
                option; nothing has changed then.
            ResetNeeded: a mask before the first full reset.
        """
        options = check_options(options, ("task_id", "reset_mask"))
        rows = self._all_rows
        if "reset_mask" in options:
            rows = np.flatnonzero(as_reset_mask(options["reset_mask"], self.num_envs))
            if not self._started:
                raise ResetNeeded("reset_mask: the first reset must be of all rows")
        seeds = row_seeds(seed, self.num_envs)
        task_ids = None
        if options.get("task_id") is not None:
            task_ids = as_task_ids(
                options["task_id"], rows, self.num_envs, self._transition.num_tasks
            )
        if seed is not None:
            for row in rows.tolist():
                row_seed = seeds[row]
                if row_seed is not None:
                    self._random.seed(row, row_seed)
        self._started = True
        self._terminated[rows] = False
        info: dict[str, Any] = {}
        row_info = self._transition.reset_rows(rows, self._random, task_ids)
        _add_rows(info, rows, row_info, self.num_envs)
        return self._transition.observe(self._all_rows), info

    def step(
        self, actions: Any
    ) -> tuple[NDArray[Any] | tuple[str, ...], FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Step every row whose episode runs; finished rows are treated as the mode says.

        Args:
            actions: integers [N], or N texts; entries of finished rows are ignored.

        Returns:
            observations [N, ...] (a tuple of N, if texts), rewards [N], terminated [N],
            truncated [N] (all False: limits are set from outside), info.

        Raises:
            ResetNeeded: before the first reset.
            ValueError, TypeError: actions of the wrong shape, type or range.
        """
        if not self._started:
            raise ResetNeeded("step() before reset(): call reset() first")
        mode = self.metadata["autoreset_mode"]
        # In same-step mode no row is finished between two steps.
        finished = self._terminated
        rows = np.flatnonzero(~finished) if finished.any() else self._all_rows
        row_actions = as_actions(actions, rows, self.num_envs, self._transition.action_space)

        info: dict[str, Any] = {}
        rewards = np.zeros(self.num_envs)
        if mode is AutoresetMode.DISABLED:
            terminated = finished.copy()
        else:
            terminated = np.zeros(self.num_envs, dtype=np.bool_)
            # These actions were ignored: the rows that an earlier step finished start anew.
            self._autoreset(np.flatnonzero(finished), info)
        if len(rows):
            rewards[rows], terminated[rows], row_info = self._transition.step_rows(
                rows, self._random, row_actions
            )
            ended = terminated[rows]
            if mode is AutoresetMode.SAME_STEP and ended.any():
                self._add_final(info, rows[ended], _take(row_info, ended))
                _add_rows(info, rows[~ended], _take(row_info, ~ended), self.num_envs)
                self._autoreset(rows[ended], info)
            else:
                _add_rows(info, rows, row_info, self.num_envs)
        if mode is not AutoresetMode.SAME_STEP:
            self._terminated = terminated.copy()
        truncated = np.zeros(self.num_envs, dtype=np.bool_)
        return self._transition.observe(self._all_rows), rewards, terminated, truncated, info

    def _autoreset(self, rows: IntArray, info: dict[str, Any]) -> None:
        """Reset `rows` with fresh tasks: the options of an earlier reset do not persist."""
        if len(rows):
            row_info = self._transition.reset_rows(rows, self._random, None)
            _add_rows(info, rows, row_info, self.num_envs)

    def _add_final(self, info: dict[str, Any], rows: IntArray, row_info: RowInfo) -> None:
        """Put the last observation and info of `rows` under ``final_obs`` and ``final_info``."""
        # An object array with None elsewhere, as SyncVectorEnv has: wrappers put observations of
        # another shape or dtype in the same places.
        final_obs = np.full(self.num_envs, None, dtype=object)
        observations = self._transition.observe(rows)
        final_obs[rows] = np.fromiter(observations, dtype=object, count=len(rows))
        final_info: dict[str, Any] = {}
        _add_rows(final_info, rows, row_info, self.num_envs)
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        mask[rows] = True
        info["final_obs"], info["_final_obs"] = final_obs, mask
        info["final_info"], info["_final_info"] = final_info, mask.copy()


def _take(row_info: RowInfo, chosen: BoolArray) -> RowInfo:
    count = int(chosen.sum())
    return {
        key: values[:count] if is_shared(values) else values[chosen]
        for key, values in row_info.items()
    }


def _add_rows(info: dict[str, Any], rows: IntArray, row_info: RowInfo, num_envs: int) -> None:
    """Add values [k, ...] of `rows` to a vector info: arrays [N, ...] and masks ``_key`` [N].

    Rows without a key hold zeros there (empty strings); only the mask tells. A value that all rows
    share stays a read-only view of one row.
    """
    if not len(rows):
        return
    for key, values in row_info.items():
        if key.startswith("_"):
            continue
        has_key = row_info.get("_" + key)
        if key not in info:
            shape = (num_envs, *values.shape[1:])
            if not is_shared(values):
                info[key] = np.zeros(shape, values.dtype)
            else:
                info[key] = values if values.shape == shape else np.broadcast_to(values[0], shape)
            info["_" + key] = np.zeros(num_envs, dtype=np.bool_)
        chosen = rows if has_key is None else rows[has_key]
        if is_shared(info[key]):
            if is_shared(values) and np.array_equal(values[0], info[key][0]):
                info["_" + key][chosen] = True
                continue
            info[key] = info[key].copy()  # these rows do not share it after all
        info[key][chosen] = values if has_key is None else values[has_key]
        info["_" + key][chosen] = True
