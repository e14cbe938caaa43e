"""Environments whose every observation, reward and end is written down, for tests of the agents.

`ScriptedEnv` plays its episodes from the script in turn. `vector` puts N scripts into a vector
environment of any autoreset mode: Gymnasium's SyncVectorEnv, or this package's native shell.
"""

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector import SyncVectorEnv, VectorEnv

from llmgym.vector import AutoresetMode, BatchVectorEnv

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
HAS_MODES = hasattr(gym.vector, "AutoresetMode")
needs_gymnasium_modes = pytest.mark.skipif(
    not HAS_MODES, reason="this Gymnasium has next-step autoreset only"
)


@dataclass(frozen=True)
class Script:
    """One episode: observation of the reset, then of each step; the reward of each step; how it ends.

    Without `ends` the last step is followed by another one for ever: the episode is never finished.
    """

    observations: list[int]
    rewards: list[float]
    ends: str = ""  # "terminated", "truncated", "terminated truncated"
    ref_logp: list[float | None] | None = None

    def step(self, t: int) -> tuple[int, float, bool, bool]:
        last = t == len(self.rewards) - 1
        ends = self.ends if last else ""
        return self.observations[t + 1], self.rewards[t], "terminated" in ends, "truncated" in ends


class ScriptedEnv(gym.Env[int, int]):
    """Plays scripts in turn, the first again after the last. Counts its resets and steps."""

    def __init__(self, scripts: list[Script], n_observations: int, n_actions: int = 2) -> None:
        self.observation_space, self.action_space = Discrete(n_observations), Discrete(n_actions)
        self.scripts = scripts
        self.resets = self.steps = 0
        self.seeds: list[int | None] = []
        self.actions: list[int] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.script = self.scripts[self.resets % len(self.scripts)]
        self.resets += 1
        self.seeds.append(seed)
        self.time = 0
        return self.script.observations[0], {"task_id": self.resets - 1}

    def step(self, action):
        info: dict[str, Any] = {"task_id": self.resets - 1}
        if self.script.ref_logp is not None and self.script.ref_logp[self.time] is not None:
            info["ref_logp"] = self.script.ref_logp[self.time]
        observation, reward, terminated, truncated = self.script.step(self.time)
        self.time += 1
        self.steps += 1
        self.actions.append(int(action))
        return observation, reward, terminated, truncated, info


class ScriptedTransition:
    """The same as a batched transition; every end is a termination here, see `ScriptedVectorEnv`."""

    def __init__(self, scripts: list[list[Script]], n_observations: int, n_actions: int = 2) -> None:
        self.observation_space, self.action_space = Discrete(n_observations), Discrete(n_actions)
        self.num_tasks = 1
        self.rows = [ScriptedEnv(row, n_observations, n_actions) for row in scripts]
        self.observations = np.zeros(len(scripts), np.int64)

    def reset_rows(self, rows, random, task_ids):
        for row in rows:
            self.observations[row], _ = self.rows[row].reset()
        return {"task_id": np.array([self.rows[row].resets - 1 for row in rows])}

    def step_rows(self, rows, random, actions):
        steps = [self.rows[row].step(action) for row, action in zip(rows, actions, strict=True)]
        self.observations[rows] = [s[0] for s in steps]
        info = {"task_id": np.array([s[4]["task_id"] for s in steps])}
        logp = [s[4].get("ref_logp") for s in steps]
        if steps and None not in logp:
            info["ref_logp"] = np.array(logp)
        return np.array([s[1] for s in steps]), np.array([s[2] or s[3] for s in steps]), info

    def observe(self, rows):
        return self.observations[rows]


class ScriptedVectorEnv(BatchVectorEnv):
    """The native shell, which itself only terminates, with the ends that the scripts say."""

    def __init__(self, scripts, n_observations, mode, n_actions=2) -> None:
        super().__init__(ScriptedTransition(scripts, n_observations, n_actions), len(scripts), mode)
        self.envs = self._transition.rows

    def step(self, actions):
        playing = [row.script for row in self.envs]
        observations, rewards, ended, _, info = super().step(actions)
        ends = [script.ends for script in playing]
        terminated = ended & np.array(["terminated" in e for e in ends])
        truncated = ended & np.array(["truncated" in e for e in ends])
        return observations, rewards, terminated, truncated, info


def vector(kind: str, mode: AutoresetMode, scripts: list[list[Script]], n_observations: int) -> VectorEnv:
    """N rows of scripts; kind is "sync" (Gymnasium) or "native" (this package's shell)."""
    if kind == "native":
        return ScriptedVectorEnv(scripts, n_observations, mode)
    makers = [lambda row=row: ScriptedEnv(row, n_observations) for row in scripts]
    if mode is NEXT_STEP:
        return SyncVectorEnv(makers)
    return SyncVectorEnv(makers, autoreset_mode=mode)


MODES = [
    pytest.param("sync", NEXT_STEP, id="sync-next-step"),
    pytest.param("sync", SAME_STEP, id="sync-same-step", marks=needs_gymnasium_modes),
    pytest.param("sync", DISABLED, id="sync-disabled", marks=needs_gymnasium_modes),
    pytest.param("native", NEXT_STEP, id="native-next-step"),
    pytest.param("native", SAME_STEP, id="native-same-step"),
    pytest.param("native", DISABLED, id="native-disabled"),
]
