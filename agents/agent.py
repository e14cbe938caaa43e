"""What an agent is: the methods that Stable-Baselines3 gives its models, and nothing more.

An SB3 or sb3-contrib model is an agent as it is. Anything else with these four methods plugs in
through `agents.make("package.module:Class", env)`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

from agents.policies.base import reads_sequences
from agents.policies.spaces import decode_actions, encode_observations


@runtime_checkable
class Agent(Protocol):
    """The protocol. A class also has ``load(path, env)``, a classmethod that returns an agent.

    Optional, used where present: ``action_probabilities(observations) -> float [N, A]``.
    """

    def learn(self, total_timesteps: int) -> Any:
        """Train for at least ``total_timesteps`` environment steps; returns the agent."""

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """Actions for one observation or a batch of them, and the recurrent state (None if there is none)."""

    def save(self, path: Any) -> Any:
        """Write the agent to ``path``."""


class _OneEnv(SyncVectorEnv):
    """A vector environment of one that does not own it: being forgotten must not close it."""

    def __del__(self) -> None:
        """Gymnasium 1.0 closes the environments of a vector environment that is collected."""


def as_vector_env(env: Any) -> VectorEnv:
    """A VectorEnv as it is; a plain Env as a vector environment of one.

    Raises:
        TypeError: env is neither.
    """
    if isinstance(env, VectorEnv):
        return env
    if isinstance(env, gym.Env):
        return _OneEnv([lambda: env])
    raise TypeError(
        f"env is a {type(env).__name__}; allowed: a gymnasium.Env (gym.make) or a "
        "gymnasium.vector.VectorEnv (gym.make_vec)"
    )


def predict_actions(
    policy: Any,
    env: VectorEnv,
    observation: Any,
    generator: torch.Generator,
    deterministic: bool,
    state: Any = None,
) -> tuple[Any, Any]:
    """Actions in the environment's form for one observation, or for a batch with a leading axis.

    Returns:
        The actions, and the state that a policy that reads sequences goes on from (None for others).
    """
    space = env.single_observation_space
    array = np.asarray(observation)
    single = array.ndim == len(space.shape or ())
    encoded = encode_observations(space, array[None] if single else array)
    extra: dict[str, Any] = {}
    if reads_sequences(policy):
        extra["state"] = state = policy.new_state(len(encoded)) if state is None else state
    with torch.inference_mode():
        if deterministic:
            actions = policy.mode(encoded, **extra)
        else:
            actions = policy.sample(encoded, generator, **extra)
    decoded = decode_actions(env.single_action_space, actions)
    return (decoded[0] if single else decoded), extra.get("state")


def policy_probabilities(policy: Any, env: VectorEnv, observations: Any) -> np.ndarray:
    """pi(.|s) of a policy with Discrete actions; observations [N, ...] -> float64 [N, A]."""
    encoded = encode_observations(env.single_observation_space, observations)
    with torch.inference_mode():
        return policy.probabilities(encoded).double().numpy()


def action_probabilities(
    agent: Any, observations: Any, n_actions: int, n_samples: int = 20_000
) -> np.ndarray:
    """The action distribution of any agent with Discrete actions from 0; float64 [N, A].

    Uses the agent's own ``action_probabilities`` where it has one, else the distribution of an SB3
    policy, else the frequencies of ``n_samples`` calls of ``predict`` per observation (standard error
    at most ``0.5 / sqrt(n_samples)``).
    """
    observations = np.asarray(observations)
    if hasattr(agent, "action_probabilities"):
        return np.asarray(agent.action_probabilities(observations), dtype=np.float64)
    if hasattr(getattr(agent, "policy", None), "get_distribution"):
        from agents.sb3 import action_probabilities_sb3

        probabilities = action_probabilities_sb3(agent, observations)
        if probabilities is not None:
            return probabilities
    counts = np.zeros((len(observations), n_actions))
    for row, observation in enumerate(observations):
        for _ in range(n_samples):
            action, _ = agent.predict(observation, deterministic=False)
            counts[row, int(action)] += 1
    return counts / n_samples
