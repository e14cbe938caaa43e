"""What the checks of `agents.checking` are made of: watched environments, gradients, altered rollouts."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor


class CheckFailed(Exception):
    """A check's verdict; the message is for the author of the agent."""


class CheckSkipped(Exception):
    """The agent does not have what the check is about; the message says what."""


def fail(seen: str, expected: str, *causes: str) -> NoReturn:
    """End a check as failed, with the usual causes of what was seen."""
    raise CheckFailed(f"seen: {seen}\nexpected: {expected}\nusual causes: " + "; ".join(causes))


# --------------------------------------------------------------------------- environments


MAX_STEPS = 100_000  # of one environment, where a check asks for far fewer


class Probe(gym.Wrapper):
    """An environment that remembers what an agent does to it, and stops an endless `learn`."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.actions: list[Any] = []
        self.n_resets = 0
        self.max_steps = MAX_STEPS

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.n_resets += 1
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.actions.append(np.array(action))
        stop_endless(len(self.actions), self.max_steps)
        return self.env.step(action)


class VectorProbe(gym.vector.VectorWrapper):
    """A native vector environment that stops an endless `learn`."""

    n_steps = 0

    def step(self, actions: Any) -> Any:
        self.n_steps += 1
        stop_endless(self.n_steps, MAX_STEPS)
        return self.env.step(actions)


def stop_endless(n_steps: int, allowed: int) -> None:
    if n_steps > allowed:
        fail(f"learn() was still stepping the environment after {allowed:,} steps",
             "it returns after about total_timesteps steps",
             "total_timesteps is ignored", "steps are counted where nothing adds to them")


class Identity(gym.Env):
    """One-step episodes: say which of the contexts is shown. The simplest thing an agent must learn.

    Discrete actions: as many as contexts, reward 1 for the right one, else 0 (chance: 1/3). Box
    actions in [-1, 1]: the context is -0.5 or 0.5 and the reward ``1 - 2 |action - context|`` (the
    best constant action earns 0). Contexts are shown as Discrete observations, or one-hot in a Box.
    """

    def __init__(self, box_observations: bool, box_actions: bool) -> None:
        self.n_contexts = 2 if box_actions else 3
        self.box_actions = box_actions
        self.observation_space = (
            spaces.Box(0.0, 1.0, (self.n_contexts,)) if box_observations else spaces.Discrete(self.n_contexts)
        )
        self.action_space = spaces.Box(-1.0, 1.0, (1,)) if box_actions else spaces.Discrete(self.n_contexts)
        self.context = 0

    def observe(self, context: int) -> Any:
        if isinstance(self.observation_space, spaces.Discrete):
            return context
        return np.eye(self.n_contexts, dtype=np.float32)[context]

    def reward(self, context: int, action: Any) -> float:
        if self.box_actions:
            return 1.0 - 2.0 * abs(float(np.asarray(action).reshape(-1)[0]) - (context - 0.5))
        return float(int(action) == context)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.context = int(self.np_random.integers(self.n_contexts))
        return self.observe(self.context), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observe(self.context), self.reward(self.context, action), True, False, {}


def _itself(env: gym.Env) -> gym.Env:
    return env


@dataclass(frozen=True)
class Subject:
    """The agent under check, and where it is checked."""

    factory: Callable[..., Any]
    env_id: str
    seed: int
    n_envs: int
    budget: int
    folder: Path

    def environment(self, make: Callable[[], gym.Env] | None = None) -> tuple[Any, list[Probe]]:
        """A fresh environment (one: scalar, several: a SyncVectorEnv), and the probes inside it."""
        base = make or (lambda: gym.make(self.env_id))
        probes = [Probe(base()) for _ in range(self.n_envs)]
        if self.n_envs == 1:
            return probes[0], probes
        return SyncVectorEnv([partial(_itself, probe) for probe in probes]), probes

    def agent(self, env: Any) -> Any:
        return self.factory(env, seed=self.seed)

    def fresh(self) -> Any:
        """A new agent on a new environment."""
        return self.agent(self.environment()[0])

    def experienced(self) -> tuple[Any, Any, Any]:
        """A new agent that has collected once: (agent, rollout, batch)."""
        agent = self.fresh()
        rollout = agent.collect()
        return agent, rollout, agent.prepare(rollout)

    def observations(self, n: int = 24) -> list[Any]:
        """Observations under random actions; of a Box, as many again spread wider round those."""
        env = gym.make(self.env_id)
        env.action_space.seed(self.seed)
        observation, _ = env.reset(seed=self.seed)
        seen = []
        for _ in range(n):
            seen.append(observation)
            observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                observation, _ = env.reset()
        space = env.observation_space
        env.close()
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            noise = np.random.default_rng(self.seed).standard_normal((n, *space.shape))
            wide = np.clip(np.stack(seen) + noise, space.low, space.high)
            seen += list(wide.astype(space.dtype))
        return seen


def stack(space: gym.Space, items: list[Any]) -> Any:
    """Items of a space as one batch, as a vector environment would give them."""
    return concatenate(space, items, create_empty_array(space, len(items)))


def load_like(agent: Any, path: Path, env: Any) -> Any:
    """What `agent` saved at path, on another environment."""
    package = type(agent).__module__.partition(".")[0]
    if package in ("stable_baselines3", "sb3_contrib"):
        from agents.sb3 import PACKAGES, load_sb3

        prefix = next(prefix for prefix, module in PACKAGES.items() if module == package)
        return load_sb3(f"{prefix}:{type(agent).__name__}", path, env)
    return type(agent).load(path, env=env)


# --------------------------------------------------------------------------- random states


def environment_states(probes: list[Probe]) -> list[bytes]:
    """The random state of each environment, for comparison."""
    return [pickle.dumps(probe.unwrapped.np_random.bit_generator.state) for probe in probes]


def space_states(env: Any, probes: list[Probe]) -> list[bytes]:
    """The random state of every action space in reach of an agent."""
    named = [getattr(env, name, None) for name in ("action_space", "single_action_space")]
    reachable = [s for s in named if s is not None] + [probe.action_space for probe in probes]
    return [pickle.dumps(space.np_random.bit_generator.state) for space in reachable]


GLOBAL_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]] = {
    "random": (random.getstate, random.setstate, random.seed),
    "numpy.random": (np.random.get_state, np.random.set_state, np.random.seed),
    "torch": (torch.get_rng_state, torch.set_rng_state, torch.manual_seed),
}


def global_states() -> dict[str, bytes]:
    """The states of the global generators, for comparison."""
    states = {name: get() for name, (get, _, _) in GLOBAL_GENERATORS.items()}
    # Two pickles of one tensor may differ.
    states["torch"] = states["torch"].tolist()
    return {name: pickle.dumps(state) for name, state in states.items()}


def seed_globals(seed: int) -> None:
    for _, _, set_seed in GLOBAL_GENERATORS.values():
        set_seed(seed)


@contextmanager
def global_states_kept() -> Iterator[None]:
    """Give the global generators back their states: agents may seed them."""
    before = {name: get() for name, (get, _, _) in GLOBAL_GENERATORS.items()}
    try:
        yield
    finally:
        for name, (_, restore, _) in GLOBAL_GENERATORS.items():
            restore(before[name])


# --------------------------------------------------------------------------- learning

# How far apart numbers may be that are the same but for rounding, by dtype.
RATIO_TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2,
}


def trainable(agent: Any) -> dict[str, Tensor]:
    return {name: p for name, p in agent.policy.named_parameters() if p.requires_grad}
