"""Ordinary environments: a batched transition of one row."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Text

from llmgym.checks import as_actions, as_task_ids, check_options
from llmgym.row_random import RowRandom
from llmgym.transition import BatchedTransition, RowInfo


class BatchOfOneEnv(gym.Env[Any, Any]):
    """An ordinary environment over a batched transition of one row.

    It draws from ``np_random`` without reading ahead, so the state of that generator and of the
    transition is the whole state.

    Args:
        transition: the dynamics, with one row.
    """

    metadata = {"render_modes": []}

    def __init__(self, transition: BatchedTransition) -> None:
        self.observation_space = transition.observation_space
        self.action_space = transition.action_space
        self._transition = transition
        self._random = RowRandom(1, block=1)
        self._row = np.zeros(1, dtype=np.int64)
        self._needs_reset = "step() before reset(): call reset() first"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; ``options={"task_id": int}`` fixes the task.

        Raises:
            ValueError, TypeError: a task id out of range or not an integer, an unknown option.
        """
        options = check_options(options, ("task_id",))
        task_ids = None
        if options.get("task_id") is not None:
            if np.ndim(options["task_id"]) != 0:
                raise ValueError(f"task_id: got {options['task_id']!r}; allowed: one integer")
            task_ids = as_task_ids(options["task_id"], self._row, 1, self._transition.num_tasks)
        super().reset(seed=seed)
        self._random.set_generator(0, self.np_random)
        row_info = self._transition.reset_rows(self._row, self._random, task_ids)
        self._needs_reset = ""
        return self._transition.observe(self._row)[0], _first_row(row_info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one action of the action space, an integer or a text.

        Raises:
            ResetNeeded: before the first reset, or after the end of the episode.
            ValueError, TypeError: an action that is none of the space.
        """
        if self._needs_reset:
            raise ResetNeeded(self._needs_reset)
        space = self._transition.action_space
        if not isinstance(space, Text) and np.ndim(action) != 0:
            raise ValueError(f"action: got shape {np.shape(action)}; allowed: one integer")
        actions = as_actions([action], self._row, 1, space)
        self._random.set_generator(0, self.np_random)
        rewards, terminated, row_info = self._transition.step_rows(self._row, self._random, actions)
        if terminated[0]:
            self._needs_reset = "step() after the end of the episode: call reset() first"
        observation = self._transition.observe(self._row)[0]
        return observation, float(rewards[0]), bool(terminated[0]), False, _first_row(row_info)


def _first_row(row_info: RowInfo) -> dict[str, Any]:
    """The info of a batch of one: Python numbers, and arrays where a row has several."""
    return {
        key: values[0].item() if values.ndim == 1 else values[0]
        for key, values in row_info.items()
        if not key.startswith("_") and row_info.get("_" + key, [True])[0]
    }
