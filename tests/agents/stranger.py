"""A stranger's agent for tests: a running mean of each action's reward, with only the four methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Bandit:
    """Greedy on the mean reward of each action; takes a plain Env and nothing of this project."""

    def __init__(self, env: Any, seed: int | None = None, optimism: float = 1.0) -> None:
        self.env, self.seed = env, seed
        self.sums = [optimism] * int(env.action_space.n)
        self.counts = [1] * int(env.action_space.n)

    def learn(self, total_timesteps: int) -> Bandit:
        self.env.reset(seed=self.seed)
        for _ in range(total_timesteps):
            action, _ = self.predict(None)
            _, reward, terminated, truncated, _ = self.env.step(action)
            self.sums[action] += float(reward)
            self.counts[action] += 1
            if terminated or truncated:
                self.env.reset()
        return self

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[int, None]:
        means = [s / n for s, n in zip(self.sums, self.counts, strict=True)]
        return means.index(max(means)), None

    def save(self, path: str) -> None:
        Path(f"{path}.json").write_text(json.dumps([self.sums, self.counts]))  # a suffix of its own

    @classmethod
    def load(cls, path: str, env: Any) -> Bandit:
        agent = cls(env)
        agent.sums, agent.counts = json.loads(Path(f"{path}.json").read_text())
        return agent


class Faulty(Bandit):
    """Breaks off in the middle of training."""

    def learn(self, total_timesteps: int) -> Bandit:
        raise ZeroDivisionError("a bug of the stranger's own")
