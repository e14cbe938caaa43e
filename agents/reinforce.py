"""REINFORCE with a choice of baseline, and an optional KL penalty to a reference policy.

    whole episodes --> (KL in the reward) --> returns --> minus a baseline --> one gradient step

Source: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning" (1992); Sutton et al., "Policy Gradient Methods" (2000), for the sum of rewards to come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from agents import on_policy, training
from agents.advantages import discounted_returns, gae, kl_in_reward, whiten
from agents.batch import Batch, LossTerms, evaluate, make_batch
from agents.losses import masked_mean, policy_gradient_loss, value_loss
from agents.policies.base import Policy
from agents.rollout import Rollout
from agents.schedules import schedule

BASELINES = ("none", "batch_mean", "value")


@dataclass(frozen=True)
class ReinforceConfig:
    """Fields as in `agents.ppo.PPOConfig` where the names are the same.

    ====================  ==========================================================================
    learning_rate         Adam's step size; a number or "lin_0.001"
    n_episodes            whole episodes of each environment per gradient step
    gamma                 discount per step
    baseline              what is subtracted from the returns: "none"; "batch_mean", the mean over the
                          steps of the batch, which includes the step itself and so shrinks the
                          expected gradient by 1 - 1/B; "value", a learned critic
    normalize_advantage   whiten advantages over the batch
    ent_coef, vf_coef     factors of the entropy bonus and of the squared value error
    max_grad_norm         the gradient is scaled down to this norm; None: off
    beta                  factor of the KL to the reference policy, in the reward per step (k1)
    policy, policy_kwargs as in PPO
    ====================  ==========================================================================
    """

    learning_rate: float | str = 1e-3
    n_episodes: int = 1
    gamma: float = 0.99
    baseline: str = "value"
    normalize_advantage: bool = False
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float | None = 0.5
    beta: float = 0.0
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(
            self, n_episodes="integer >= 1", gamma="in [0, 1]", ent_coef=">= 0", vf_coef=">= 0",
            max_grad_norm="> 0", beta=">= 0",
        )
        training.check_choice("baseline", self.baseline, BASELINES)
        schedule(self.learning_rate, "learning_rate")


class Reinforce:
    """REINFORCE on any Env or VectorEnv with Box, Discrete or MultiBinary observations.

    Args:
        env: a Gymnasium Env or VectorEnv.
        seed: seeds weights, action sampling and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
        config: fields of `ReinforceConfig`.
    """

    algorithm = "reinforce"

    learn = on_policy.learn
    predict = on_policy.predict
    action_probabilities = on_policy.action_probabilities
    save = on_policy.save
    load = classmethod(on_policy.load)

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(ReinforceConfig, config)
        parts = on_policy.build(self.config, env, seed, reference)
        self.env, self.generator, self.policy, self.optimizer, self.reference, self.collector = parts
        self.num_timesteps = self.n_updates = 0

    def collect(self) -> Rollout:
        """The next ``n_episodes`` whole episodes of each environment."""
        return self.collector.collect_episodes(self.config.n_episodes)

    def prepare(self, rollout: Rollout) -> Batch:
        """Rewards (less the KL penalty, if it is there) to returns, and those to advantages.

        With the critic as baseline a truncated episode bootstraps from its final observation; the
        other baselines have no value to bootstrap from, and its return ends with its last reward.
        """
        cfg = self.config
        training.refuse_stale(rollout, self.collector)
        rewards = rollout.rewards
        if cfg.beta > 0:
            ref_log_probs = training.reference_log_probs(rollout, cfg.beta)
            rewards = kl_in_reward(rewards, rollout.log_probs, ref_log_probs, cfg.beta)
        if cfg.baseline == "value":
            advantages = gae(
                rewards, rollout.values, rollout.next_values, rollout.terminated,
                rollout.truncated, cfg.gamma, 1.0, rollout.mask,
            )
            returns = advantages + rollout.values
        else:
            ends = rollout.terminated | rollout.truncated
            returns = discounted_returns(rewards, ends, cfg.gamma, rollout.mask)
            mean = masked_mean(returns, rollout.mask) if cfg.baseline == "batch_mean" else 0.0
            advantages = returns - mean
        batch = make_batch(rollout, advantages, returns)
        if cfg.normalize_advantage:
            batch.advantages = whiten(batch.advantages, batch.mask, ddof=1)
        return batch

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> LossTerms:
        """``policy gradient + vf_coef * (V - G)^2 - ent_coef * entropy``, means over samples."""
        cfg = self.config
        evaluation = evaluate(self.policy, batch)
        policy = masked_mean(policy_gradient_loss(evaluation.log_prob, batch.advantages), batch.mask)
        entropy = masked_mean(evaluation.entropy, batch.mask)
        total = policy - cfg.ent_coef * entropy if cfg.ent_coef > 0 else policy
        value = torch.zeros(())
        if cfg.baseline == "value":
            # vf_coef multiplies the squared error, as in PPO; value_loss is half of that.
            value = 2.0 * masked_mean(value_loss(evaluation.value, batch.returns), batch.mask)
            total = total + cfg.vf_coef * value
        ratio = torch.exp(evaluation.log_prob - batch.old_log_probs).detach()
        return LossTerms(total, policy, value, entropy, torch.zeros(()), batch.steps(ratio))

    def update(self, rollout: Rollout, progress_remaining: float = 1.0) -> dict[str, float]:
        """One gradient step on the whole rollout. Returns its metrics."""
        batch = self.prepare(rollout)
        terms, metrics = training.one_step(self, batch, progress_remaining)
        if self.config.baseline == "value":
            metrics["train/value_loss"] = terms.value.item()
            metrics["train/explained_variance"] = training.explained_variance(batch)
        return metrics
