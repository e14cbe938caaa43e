"""A task of several steps that draws random numbers in every call, for tests of the shells."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from llmgym.scalar import BatchOfOneEnv
from llmgym.vector import AutoresetMode, BatchVectorEnv

MODES = list(AutoresetMode)
N = 5


class CountdownTransition:
    """Task k lasts k + 1 steps; the observation is [task, steps left] plus a random number.

    `score` is in the info of even steps only, so that rows differ in what their info holds.
    """

    observation_space = Box(-100.0, 100.0, (3,), np.float32)
    action_space = Discrete(4, start=1)
    num_tasks = 4

    def __init__(self, num_rows: int) -> None:
        self.state = np.zeros((num_rows, 3), dtype=np.float32)

    def reset_rows(self, rows, random, task_ids):
        if task_ids is None:
            task_ids = random.integers(rows, self.num_tasks)
        self.state[rows, 0] = task_ids
        self.state[rows, 1] = task_ids + 1
        self.state[rows, 2] = random.uniform(rows)
        return {"task_id": task_ids}

    def step_rows(self, rows, random, actions):
        self.state[rows, 1] -= 1
        self.state[rows, 2] = random.uniform(rows)
        noise = random.normal(rows)
        mask = self.state[rows, 1, None] > np.arange(4)
        info = {"left": self.state[rows, 1].astype(np.int64), "noise": noise, "mask": mask}
        return actions + noise, self.state[rows, 1] == 0, info

    def observe(self, rows):
        return self.state[rows]


class PairEnv(gym.Env[Any, Any]):
    """Gymnasium's side of a comparison: forwards to a BatchOfOneEnv."""

    metadata = {"render_modes": []}

    def __init__(self) -> None:
        self.inner = BatchOfOneEnv(CountdownTransition(1))
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed, options=options)

    def step(self, action):
        return self.inner.step(action)


def scalar() -> BatchOfOneEnv:
    return BatchOfOneEnv(CountdownTransition(1))


def vector(mode="next_step", n: int = N) -> BatchVectorEnv:
    return BatchVectorEnv(CountdownTransition(n), n, mode)


def actions(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 5, (steps, N))


def assert_same(left: Any, right: Any) -> None:
    """Equal trees of dicts and arrays, with equal dtypes; object arrays entry by entry.

    Floats to 1e-12: NumPy's cosine of one number may differ from that of many in the last bit.
    """
    if isinstance(left, dict):
        assert set(left) == set(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, np.ndarray) and left.dtype == object:
        assert right.dtype == object and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same(one, other)
    else:
        assert np.asarray(left).dtype == np.asarray(right).dtype
        if np.asarray(left).dtype.kind == "U":
            np.testing.assert_array_equal(left, right)
        else:
            np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


def info_of_row(info: dict[str, Any], row: int) -> dict[str, Any]:
    return {
        key: value[row]
        for key, value in info.items()
        if not key.startswith(("_", "final_")) and info["_" + key][row]
    }
