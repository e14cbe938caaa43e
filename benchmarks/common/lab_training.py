"""Training runs of every arm of `common.lab_arms`, measured against the exact optimum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import agents
from common.lab_arms import ARMS, Arm, resting_point
from common.lab_gradient import make_pool
from llmgym import AnswerPool


def training_job(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one arm with one seed. For ``common.runner.run_jobs``."""
    arm = next(a for a in ARMS if a.name == config["arm"])
    pool = make_pool("binary")
    env = gym.make_vec("llmgym:AnswerPool-v0", num_envs=arm.n_envs, pool=pool)
    # As many steps as there are passes over an update's answers, each that much shorter.
    rate = config["learning_rate"] / arm.settings.get("n_epochs", 1)
    agent = agents.make(
        arm.agent, env, seed=config["seed"], beta=config["beta"], max_grad_norm=None,
        learning_rate=f"lin_{rate:g}", **arm.settings,
    )  # fmt: skip
    agent.learn(config["answers"])
    policy = agents.action_probabilities(agent, np.arange(pool.n_prompts), pool.n_answers)
    env.close()
    return measure(arm, pool, policy, config["beta"]) | {
        "answers": agent.num_timesteps, "updates": agent.n_updates
    }  # fmt: skip


def measure(arm: Arm, pool: AnswerPool, policy: np.ndarray, beta: float) -> dict[str, float]:
    """A policy [P, A] against the optimum and the arm's resting point (infinite if that is pass rate 1)."""
    rest = resting_point(arm, pool, beta)
    return {
        "kl_optimum": pool.kl(policy, pool.optimal_policy(beta)),
        "kl_rest": pool.kl(policy, rest),
        "reward": pool.expected(policy, "proxy"),
        "kl_reference": pool.kl(policy, pool.ref_probs),
    }
