"""An environment in which everything that happens in an episode follows from its task and its actions.

Task k lasts k + 1 steps. At step t its observation is ``8 * k + t``, an action a earns ``10 * k + a``, and
the reference gives every action the probability ``1 / (k + 2)``. Odd tasks are cut by the length limit.
"""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector import SyncVectorEnv
from scripted import DISABLED, NEXT_STEP, SAME_STEP, needs_gymnasium_modes

from llmgym.scalar import BatchOfOneEnv
from llmgym.vector import AutoresetMode, BatchVectorEnv

N_TASKS, N_ACTIONS = 5, 3


class TaskTransition:
    """A `llmgym.transition.BatchedTransition`; counts the steps that rows really took."""

    observation_space, action_space = Discrete(8 * N_TASKS), Discrete(N_ACTIONS)
    num_tasks = N_TASKS

    def __init__(self, n_rows: int) -> None:
        self.tasks, self.times = np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64)
        self.steps = 0

    def reset_rows(self, rows, random, task_ids):
        self.tasks[rows] = random.integers(rows, N_TASKS) if task_ids is None else task_ids
        self.times[rows] = 0
        return {"task_id": self.tasks[rows]}

    def step_rows(self, rows, random, actions):
        self.steps += len(rows)
        tasks = self.tasks[rows]
        self.times[rows] += 1
        over = self.times[rows] > tasks
        info = {
            "task_id": tasks, "ref_logp": -np.log(tasks + 2.0),
            "stop_reason": np.where(tasks % 2 == 1, "length", "eos"), "_stop_reason": over,
            "correct": (actions == 0).astype(float), "_correct": over,
        }  # fmt: skip
        return 10.0 * tasks + actions, over, info

    def observe(self, rows):
        return 8 * self.tasks[rows] + np.minimum(self.times[rows], 7)


def task_env(kind: str, mode: AutoresetMode, n_rows: int):
    """Rows of the task environment, and the transitions that count their steps."""
    if kind == "native":
        transition = TaskTransition(n_rows)
        return BatchVectorEnv(transition, n_rows, mode), [transition]
    transitions = [TaskTransition(1) for _ in range(n_rows)]
    makers = [lambda t=t: BatchOfOneEnv(t) for t in transitions]
    modes = {} if mode is NEXT_STEP else {"autoreset_mode": mode}
    return SyncVectorEnv(makers, **modes), transitions


class CountOnes(gym.Env):
    """No tasks, three steps, two actions: the return is the number of ones, and there is no info."""

    observation_space, action_space = Discrete(3), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert not options
        self.time = 0
        return 0, {}

    def step(self, action):
        self.time += 1
        return min(self.time, 2), float(action), self.time == 3, False, {}


WORLDS = [
    pytest.param("native", NEXT_STEP, id="native-next-step"),
    pytest.param("native", SAME_STEP, id="native-same-step"),
    pytest.param("native", DISABLED, id="native-disabled"),
    pytest.param("sync", NEXT_STEP, id="sync-next-step"),
    pytest.param("sync", SAME_STEP, id="sync-same-step", marks=needs_gymnasium_modes),
    pytest.param("sync", DISABLED, id="sync-disabled", marks=needs_gymnasium_modes),
]
