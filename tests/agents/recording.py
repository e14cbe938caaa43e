"""Policies and collectors for the tests of rollouts."""

import numpy as np
import torch

from agents.advantages import gae
from agents.collector import Collector
from agents.policies.table import TablePolicy
from agents.rollout import Rollout


def table(values: list[float], n_actions: int = 2) -> TablePolicy:
    """A policy whose critic says values[s] of observation s."""
    rng = np.random.default_rng(0)
    policy = TablePolicy(len(values), n_actions, rng.normal(size=(len(values), n_actions)))
    policy.values.data = torch.tensor(values, dtype=torch.float32)
    return policy


def collector(env, policy, seed: int | None = 0, reference=None) -> Collector:
    return Collector(env, policy, torch.Generator().manual_seed(0), seed, reference)


def advantages(rollout: Rollout, gamma: float = 1.0, lam: float = 1.0) -> torch.Tensor:
    return gae(rollout.rewards, rollout.values, rollout.next_values, rollout.terminated, rollout.truncated,
               gamma, lam, rollout.mask)  # fmt: skip
