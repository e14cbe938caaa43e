"""Environments for the benchmarks, with every episode recorded on the environment's side.

The record is kept below the agent and below any reward scaling, so it holds the true returns of
every episode whoever trains: our agents, Stable-Baselines3's or a stranger's.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv

import llmgym  # noqa: F401  (registers its ids with Gymnasium)
from agents.files import replace_file

COLUMNS = ("episode", "step", "return", "length")


class Episode(NamedTuple):
    """One finished episode."""

    step: int  # environment steps taken by all sub-environments together when it ended
    total: float  # its return: the sum of the unscaled rewards
    length: int  # its own steps


@dataclass
class EpisodeLog:
    """Finished episodes in order of completion, and the environment steps so far.

    The sub-environments of a vector environment share one log. Those that finish in the same
    vector step are logged in the order of their index. Steps are real transitions: the step on
    which next-step autoreset only resets is not one. An episode that the agent abandons by an
    early ``reset``, or that the budget cuts, is not logged. `on_episode` is called with each
    episode as it is logged.
    """

    steps: int = 0
    episodes: list[Episode] = field(default_factory=list)
    on_episode: Callable[[Episode], None] | None = None

    def add(self, total: float, length: int) -> None:
        """Log an episode that ended at the current number of steps."""
        episode = Episode(self.steps, total, length)
        self.episodes.append(episode)
        if self.on_episode is not None:
            self.on_episode(episode)

    @property
    def returns(self) -> np.ndarray:
        """Return of each episode, float ``[E]``."""
        return np.array([episode.total for episode in self.episodes], dtype=float)

    @property
    def end_steps(self) -> np.ndarray:
        """Environment step at which each episode ended, int ``[E]``."""
        return np.array([episode.step for episode in self.episodes], dtype=int)

    def save(self, path: Path) -> None:
        """Write a CSV file with the columns episode (from 1), step, return, length."""
        with replace_file(path) as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for number, episode in enumerate(self.episodes, start=1):
                writer.writerow([number, episode.step, repr(episode.total), episode.length])

    @classmethod
    def load(cls, path: Path) -> EpisodeLog:
        """Read what `save` wrote. `steps` is that of the last finished episode.

        Raises ValueError where the columns are others.
        """
        with path.open(newline="") as file:
            reader = csv.reader(file)
            header = tuple(next(reader, ()))
            if header != COLUMNS:
                raise ValueError(f"{path}: columns are {header}, expected {COLUMNS}")
            episodes = [Episode(int(step), float(total), int(n)) for _, step, total, n in reader]
        return cls(episodes[-1].step if episodes else 0, episodes)


class RecordEpisodes(gym.Wrapper):
    """Adds every finished episode of one scalar environment to a log.

    The first ``reset`` without a seed uses `seed`, so that an agent which never seeds its
    environment is reproducible all the same; a seed that the agent gives wins.
    """

    def __init__(self, env: gym.Env, log: EpisodeLog, seed: int | None = None):
        super().__init__(env)
        self.log = log
        self._first_seed = seed
        self._total, self._length, self._running = 0.0, 0, False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; the steps of an unfinished episode are forgotten."""
        if seed is None:
            seed = self._first_seed
        self._first_seed = None
        self._total, self._length, self._running = 0.0, 0, True
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and record. Raises RuntimeError after an end: such steps would forge episodes."""
        if not self._running:
            raise RuntimeError("step() outside an episode: call reset() first")
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.log.steps += 1
        self._length += 1
        self._total += float(reward)
        if terminated or truncated:
            self._running = False
            self.log.add(self._total, self._length)
        return observation, reward, terminated, truncated, info


def make_env(
    env_id: str,
    n_envs: int,
    log: EpisodeLog,
    reward_scale: float = 1.0,
    seed: int = 0,
    **kwargs: Any,
) -> gym.Env | SyncVectorEnv:
    """A recorded environment: a plain ``Env`` for `n_envs` 1, else a ``SyncVectorEnv``.

    Sub-environment i is seeded with ``seed + i``, as Gymnasium seeds a vector environment, unless
    the agent seeds it. The agent sees rewards times `reward_scale`; the log holds the true ones.
    `kwargs` go to ``gym.make``.
    """
    if n_envs < 1:
        raise ValueError(f"n_envs is {n_envs}, must be at least 1")

    def make_one(index: int) -> gym.Env:
        env: gym.Env = RecordEpisodes(gym.make(env_id, **kwargs), log, seed + index)
        if reward_scale != 1.0:
            env = gym.wrappers.TransformReward(env, lambda r: reward_scale * float(r))
        return env

    if n_envs == 1:
        return make_one(0)
    return SyncVectorEnv([partial(make_one, index) for index in range(n_envs)])


def random_returns(env_id: str, n_episodes: int = 100, seed: int = 0, **kwargs: Any) -> np.ndarray:
    """Returns of `n_episodes` episodes of uniformly random actions, float ``[n_episodes]``."""
    log = EpisodeLog()
    env = make_env(env_id, 1, log, seed=seed, **kwargs)
    env.action_space.seed(seed)
    while len(log.episodes) < n_episodes:
        env.reset()
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = bool(terminated or truncated)
    env.close()
    return log.returns
