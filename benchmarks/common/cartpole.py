"""CartPole-v1 as each library steps it, every episode recorded, and a clock that stops at a score."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from common.environments import Episode, EpisodeLog, RecordEpisodes, make_env
from common.stats import WINDOW
from common.timing import Timing, now


class RecordedCartPole(CartPoleVectorEnv):
    """Gymnasium's native CartPole vector environment with its episodes in an `EpisodeLog`.

    Its autoreset is next-step: the step on which a row only resets is no step of the log. A subclass
    and no wrapper, because SB3's adapter resets rows within it. Episodes that end in the same step
    are logged with the same number of steps, that of the whole vector step.
    """

    def __init__(self, log: EpisodeLog, num_envs: int) -> None:
        super().__init__(num_envs=num_envs, max_episode_steps=500)
        self.log = log
        self._totals = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self._totals[:], self._lengths[:] = 0.0, 0
        return super().reset(**kwargs)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        executed = ~self.prev_done
        observation, reward, terminated, truncated, info = super().step(action)
        self.log.steps += int(executed.sum())
        self._totals += reward  # 0 on a reset step
        self._lengths += executed
        for row in np.flatnonzero(terminated | truncated):
            self.log.add(float(self._totals[row]), int(self._lengths[row]))
            self._totals[row], self._lengths[row] = 0.0, 0
        return observation, reward, terminated, truncated, info


def make_cartpole(kind: str, n_envs: int, log: EpisodeLog, seed: int) -> Any:
    """CartPole-v1 as a vector environment of one of three kinds, recorded in `log`.

    "sync" is Gymnasium's ``SyncVectorEnv`` of scalar environments, "dummy" SB3's ``DummyVecEnv`` of
    the same with SB3's ``Monitor`` (what SB3's own helpers make), "native" Gymnasium's vectorised
    CartPole, which both libraries can train on.
    """
    if kind == "native":
        return RecordedCartPole(log, n_envs)
    if kind == "sync":
        return make_env("CartPole-v1", n_envs, log, seed=seed)

    def make_one(index: int) -> gym.Env:
        return Monitor(RecordEpisodes(gym.make("CartPole-v1"), log, seed + index))

    return DummyVecEnv([partial(make_one, index) for index in range(n_envs)])


class ScoreClock:
    """Times from its making until the mean return of the last `window` episodes reaches a threshold.

    ``EpisodeLog(on_episode=clock)``: the time is read on the environment's side, in the step that
    ends the decisive episode, so it does not depend on how often an agent calls back.

    Args:
        threshold: mean return to reach.
        budget: CPU seconds after which a run has failed.
        clock: reads the two clocks; for tests.
    """

    def __init__(
        self,
        threshold: float,
        budget: float,
        window: int = WINDOW,
        clock: Callable[[], Timing] = now,
    ) -> None:
        self.threshold, self.budget = threshold, budget
        self.reached: Timing | None = None
        self._recent: deque[float] = deque(maxlen=window)
        self._clock = clock
        self._start = clock()

    def __call__(self, episode: Episode) -> None:
        self._recent.append(episode.total)
        full = len(self._recent) == self._recent.maxlen
        if self.reached is None and full and sum(self._recent) >= self.threshold * len(self._recent):
            self.reached = self.elapsed()

    def elapsed(self) -> Timing:
        """Time since the making."""
        return self._clock() - self._start

    def running(self, *_: Any) -> bool:
        """Whether training is to go on: a callback for our agents and for SB3's."""
        return self.reached is None and self.elapsed().cpu < self.budget

    def result(self) -> tuple[Timing, bool]:
        """The time to the threshold and True, or, where it was not reached, the budget and False.

        The wall-clock time of a failed run is the time it really took.
        """
        if self.reached is not None:
            return self.reached, True
        return Timing(wall=self.elapsed().wall, cpu=self.budget), False
