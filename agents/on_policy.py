"""What every on-policy agent of this package is besides its algorithm: the loop, `predict`, files.

An algorithm's class takes these functions as its methods by name, so that its file holds what is its
own: ``collect``, ``prepare``, ``loss`` and ``update`` (see `agents.checking`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from agents import checkpoint, training
from agents.agent import as_vector_env, policy_probabilities, predict_actions
from agents.collector import Collector
from agents.policies.base import Policy
from agents.training_run import TrainingRun


class Parts(NamedTuple):
    """What an agent is made of, besides its configuration and its counters."""

    env: VectorEnv
    generator: torch.Generator
    policy: Any
    optimizer: training.FlatAdam
    reference: Policy | None
    collector: Collector


def build(config: Any, env: Any, seed: int | None, reference: Policy | None) -> Parts:
    """The parts of a new agent.

    Args:
        config: the agent's configuration, with fields ``policy`` and ``policy_kwargs``.
        seed: seeds weights, action sampling, minibatches and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
    """
    vector_env, generator = as_vector_env(env), training.make_generator(seed)
    policy = training.build_policy(config.policy, vector_env, generator, config.policy_kwargs)
    reference = training.frozen(reference)
    collector = Collector(vector_env, policy, generator, seed, reference)
    return Parts(vector_env, generator, policy, training.FlatAdam(policy), reference, collector)


def learn(
    self: Any,
    total_timesteps: int,
    run_dir: str | Path | None = None,
    progress_bar: bool = False,
    callback: Callable[[Any], bool | None] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> Any:
    """Train for at least ``total_timesteps`` more environment steps; returns the agent.

    Algorithms that learn from whole episodes may take steps that they do not learn from: a row of a
    vector environment that has its episodes goes on until the others have theirs. Those are counted
    (there are none in disabled autoreset mode, where it waits).

    Args:
        run_dir: folder for metrics.jsonl and TensorBoard events.
        callback: called after every iteration; returning False ends training.
        checkpoint_every: environment steps between two checkpoints in ``run_dir``; None: none.
        resume: go on from the newest checkpoint of ``run_dir``, to the numbers of a run that never
            stopped (see `agents.training_run`); agent and environment must be freshly made.
    """
    run = TrainingRun(self, total_timesteps, run_dir, progress_bar, checkpoint_every, resume)
    with training.single_thread(), run:
        while run.steps_left > 0:
            rollout = self.collect()
            self.num_timesteps += rollout.env_steps
            run.record(self.update(rollout, run.progress_remaining))
            if callback is not None and callback(self) is False:
                break
    return self


def predict(
    self: Any,
    observation: Any,
    state: Any = None,
    episode_start: Any = None,
    deterministic: bool = False,
) -> tuple[Any, Any]:
    """Actions for one observation or a batch of them, and the policy's state for the next call.

    Policies that read sequences have one (their cache, for as many rows as the batch has); for others it
    is None. It need not be passed on: without it everything is computed anew.
    """
    return predict_actions(self.policy, self.env, observation, self.generator, deterministic, state)


def action_probabilities(self: Any, observations: Any) -> np.ndarray:
    """pi(.|s) for Discrete actions, [N, A]."""
    return policy_probabilities(self.policy, self.env, observations)


def save(self: Any, path: str | Path) -> None:
    """Write configuration, weights, optimiser and random state to one file, atomically."""
    checkpoint.save_agent(path, self)


def load(
    cls: Any, path: str | Path, env: Any, reference: Policy | None = None, policy: Policy | None = None
) -> Any:
    """An agent from `save`'s file. ``reference`` and a ``policy`` given as objects are given again."""
    return checkpoint.load_agent(path, cls, env, reference, policy)
