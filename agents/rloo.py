"""RLOO: REINFORCE with the mean reward of the other completions of the same prompt as baseline.

    groups of episodes --> (KL in the reward) --> leave-one-out advantages --> one gradient step

Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human
Feedback in LLMs" (2024); the baseline is Kool et al. (2019). The whole completion is one action: its
log-prob is the sum over its steps, and the KL is part of its reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents import groups, on_policy, training
from agents.advantages import leave_one_out
from agents.batch import Batch, LossTerms
from agents.policies.base import Policy
from agents.rollout import Rollout
from agents.schedules import schedule


@dataclass(frozen=True)
class RLOOConfig:
    """Fields as in TRL where the names are the same.

    ====================  ==========================================================================
    learning_rate         Adam's step size; a number or "lin_0.001"
    num_generations       completions per prompt, at least 2
    n_groups              prompts per gradient step
    beta                  factor of the KL to the reference policy, in the reward per step (k1)
    ent_coef              factor of the entropy bonus, the sum over the steps of a completion
    max_grad_norm         the gradient is scaled down to this norm; None: off
    policy, policy_kwargs as in PPO
    ====================  ==========================================================================
    """

    learning_rate: float | str = 1e-3
    num_generations: int = 4
    n_groups: int = 16
    beta: float = 0.0
    ent_coef: float = 0.0
    max_grad_norm: float | None = 1.0
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(
            self, num_generations="integer >= 2", n_groups="integer >= 1", beta=">= 0", ent_coef=">= 0",
            max_grad_norm="> 0",
        )
        schedule(self.learning_rate, "learning_rate")


class RLOO:
    """RLOO on any Env or VectorEnv; groups share a task where the environment has tasks.

    Args:
        env: a Gymnasium Env or VectorEnv.
        seed: seeds weights, action sampling and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
        config: fields of `RLOOConfig`.
    """

    algorithm = "rloo"

    learn = on_policy.learn
    predict = on_policy.predict
    action_probabilities = on_policy.action_probabilities
    save = on_policy.save
    load = classmethod(on_policy.load)

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(RLOOConfig, config)
        parts = on_policy.build(self.config, env, seed, reference)
        self.env, self.generator, self.policy, self.optimizer, self.reference, self.collector = parts
        self.num_timesteps = self.n_updates = 0

    def collect(self) -> Rollout:
        """``num_generations`` episodes of each of ``n_groups`` tasks."""
        return groups.collect_groups(self.collector, self.config.n_groups, self.config.num_generations)

    def prepare(self, rollout: Rollout) -> Batch:
        """Rewards of whole episodes (less the KL penalty) to leave-one-out advantages."""
        training.refuse_stale(rollout, self.collector)
        rewards = groups.episode_rewards(rollout, self.config.beta)
        advantages = leave_one_out(rewards, groups.group_ids(rollout))
        return groups.group_batch(rollout, advantages, rewards)

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> LossTerms:
        """``-A * log pi(completion) - ent_coef * its steps' entropy``, mean over completions."""
        return groups.sequence_gradient_loss(self.policy, batch, self.config.ent_coef)

    def update(self, rollout: Rollout, progress_remaining: float = 1.0) -> dict[str, float]:
        """One gradient step on the whole rollout. Returns its metrics."""
        _, metrics = training.one_step(self, self.prepare(rollout), progress_remaining)
        return metrics | groups.group_metrics(rollout.episodes)
