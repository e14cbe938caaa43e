"""ReMax: REINFORCE with the reward of the greedy completion of the same prompt as baseline.

    sampled and greedy episodes --> (KL in the reward) --> reward minus greedy reward --> one gradient step

Source: Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning
Large Language Models" (2024), eq. 5 and algorithm 2. The greedy completion costs a rollout and is not
trained on; its baseline does not depend on the samples, so the gradient is unbiased with one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from agents import groups, on_policy, training
from agents.advantages import greedy_baseline
from agents.batch import Batch, LossTerms
from agents.policies.base import Policy
from agents.rollout import Rollout, concatenate
from agents.schedules import schedule


@dataclass(frozen=True)
class ReMaxConfig:
    """Fields as in `agents.rloo.RLOOConfig`; ``num_generations`` sampled completions per prompt, from 1."""

    learning_rate: float | str = 1e-3
    num_generations: int = 1
    n_groups: int = 64
    beta: float = 0.0
    ent_coef: float = 0.0
    max_grad_norm: float | None = 1.0
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(
            self, num_generations="integer >= 1", n_groups="integer >= 1", beta=">= 0", ent_coef=">= 0",
            max_grad_norm="> 0",
        )
        schedule(self.learning_rate, "learning_rate")


class ReMax:
    """ReMax on any Env or VectorEnv; the greedy episode is of the same task where there are tasks.

    Args:
        env: a Gymnasium Env or VectorEnv.
        seed: seeds weights, action sampling and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
        config: fields of `ReMaxConfig`.
    """

    algorithm = "remax"

    learn = on_policy.learn
    predict = on_policy.predict
    action_probabilities = on_policy.action_probabilities
    save = on_policy.save
    load = classmethod(on_policy.load)

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(ReMaxConfig, config)
        parts = on_policy.build(self.config, env, seed, reference)
        self.env, self.generator, self.policy, self.optimizer, self.reference, self.collector = parts
        self.num_timesteps = self.n_updates = 0

    def collect(self) -> Rollout:
        """Sampled episodes of ``n_groups`` tasks and a greedy one of each, told apart by their group ids.

        The greedy episode of group g has the group id ``-2 - g`` (-1 means no group).
        """
        size = self.config.num_generations
        tasks = self.collector.draw_tasks(self.config.n_groups)
        ids = np.arange(len(tasks))
        sampled = self.collector.collect_tasks(tasks.repeat(size), ids.repeat(size))
        return concatenate([sampled, self.collector.collect_tasks(tasks, -2 - ids, greedy=True)])

    def prepare(self, rollout: Rollout) -> Batch:
        """Rewards of whole episodes (less the KL penalty) minus those of the greedy ones."""
        training.refuse_stale(rollout, self.collector)
        rewards, ids = groups.episode_rewards(rollout, self.config.beta), groups.group_ids(rollout)
        sampled = ids >= 0
        advantages = rewards.clone()
        advantages[sampled] = greedy_baseline(
            rewards[sampled], ids[sampled], rewards[~sampled], -2 - ids[~sampled]
        )
        batch = groups.group_batch(rollout, advantages, rewards)
        return batch.select((ids.sort().values >= 0).nonzero().flatten())

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> LossTerms:
        """``-A * log pi(completion) - ent_coef * its steps' entropy``, mean over completions."""
        return groups.sequence_gradient_loss(self.policy, batch, self.config.ent_coef)

    def update(self, rollout: Rollout, progress_remaining: float = 1.0) -> dict[str, float]:
        """One gradient step on the sampled completions. Returns its metrics."""
        _, metrics = training.one_step(self, self.prepare(rollout), progress_remaining)
        sampled = rollout.episodes.group_ids >= 0
        return metrics | groups.group_metrics(rollout.episodes.select(sampled)) | {
            "group/greedy_reward": float(rollout.episodes.returns[~sampled].mean())
        }
