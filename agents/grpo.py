"""GRPO: PPO's clipped loss with the group's mean reward as baseline, and every detail that is disputed.

    groups of episodes --> rewards --> group advantages --> num_iterations x minibatches of the clipped loss

Source: Shao et al., "DeepSeekMath" (2024). What others changed since is a field of `GRPOConfig`, each
with its source; `agents.presets` names their combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agents import groups, on_policy, training
from agents.advantages import equal_groups, group_advantages
from agents.batch import Batch, LossTerms, evaluate
from agents.kl import ESTIMATORS, bias_corrected
from agents.losses import (
    LOSS_TYPES,
    clipped_loss,
    loss_weights,
    masked_mean,
    sequence_log_ratio,
    weighted_loss,
)
from agents.policies.base import Evaluation, Policy
from agents.rollout import Rollout, concatenate
from agents.schedules import schedule

MAX_ROUNDS = 10  # of dynamic sampling, as in DAPO's code: then it trains on the groups that it has


@dataclass(frozen=True)
class GRPOConfig:
    """Fields as in TRL where it has them.

    ==============================  ================================================================
    learning_rate                   Adam's step size; a number or "lin_0.001"
    num_generations                 completions per prompt, at least 2
    n_groups                        prompts per rollout
    batch_size                      completions per gradient step, a multiple of num_generations; a
                                    group is never split. None: all of the rollout
    num_iterations                  passes over each rollout (mu in the paper)
    scale_rewards                   "group": divide by the group's standard deviation (DeepSeekMath);
                                    "batch": by that of all rewards (Liu et al., "Tricks or Traps?",
                                    2025); "none": by nothing (Dr. GRPO, Liu et al. 2025)
    std, std_eps                    "sample" (n - 1) or "population" (n) deviation, and what is added
                                    to it. The paper does not say which
    loss_type                       how steps become one loss, see `agents.losses.loss_weights`:
                                    "grpo", "dapo", "bnpo", "dr_grpo", "sum"
    max_completion_length           the constant of "dr_grpo", in steps
    epsilon, epsilon_high           clip range below and above ratio 1; None: epsilon_high = epsilon.
                                    A wider upper side is DAPO's "clip-higher" (Yu et al., 2025)
    delta                           upper bound of the ratio where the advantage is negative ("dual
                                    clip", Ye et al., 2020; TRL's two-sided clipping); None: off
    importance_sampling_level       "token", or "sequence": one ratio per completion, the geometric
                                    mean of its steps' (GSPO, Zheng et al., 2025, with an epsilon of
                                    the order of 3e-4)
    beta                            factor of the KL to the reference policy; 0: none. In the loss it
                                    weighs more than it says: the group's mean holds the sample itself
                                    and so scales the reward's gradient, but not the KL's, by 1 - 1/G.
                                    The optimum is that of beta * G / (G - 1)
    kl_in                           "loss": beta * kl_estimator of each step (DeepSeekMath, k3);
                                    "reward": -beta * k1 of each step in the episode's reward, before
                                    the baseline, whose optimum is the closed form ref * exp(r / beta)
                                    if nothing divides by the deviation
    kl_estimator                    "k1", "k2" or "k3", for kl_in="loss". See `agents.kl`: on-policy
                                    only k2 has the gradient of KL(policy || reference)
    use_bias_correction_kl          multiply the estimate by the probability ratio: its gradient is
                                    then that of KL(policy || reference), also off-policy (DeepSeek-V3.2,
                                    2025; TRL). With k2 the ratio is a weight without gradient
    mask_truncated_completions      leave completions that a limit cut out of the loss; their rewards
                                    still count for their group's mean (DAPO's overlong filtering)
    dynamic_sampling                drop groups of equal rewards and draw others until there are
                                    n_groups, at most 10 times (DAPO)
    max_grad_norm                   the gradient is scaled down to this norm; None: off
    policy, policy_kwargs           as in PPO
    ==============================  ================================================================
    """

    learning_rate: float | str = 1e-3
    num_generations: int = 8
    n_groups: int = 8
    batch_size: int | None = None
    num_iterations: int = 1
    scale_rewards: str = "group"
    std: str = "sample"
    std_eps: float = 1e-4
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    beta: float = 0.0
    kl_in: str = "loss"
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False
    mask_truncated_completions: bool = False
    dynamic_sampling: bool = False
    max_grad_norm: float | None = 1.0
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(
            self, num_generations="integer >= 2", n_groups="integer >= 1", batch_size="integer >= 1",
            num_iterations="integer >= 1", std_eps=">= 0", max_completion_length="integer >= 1",
            epsilon="> 0", epsilon_high="> 0", delta="> 1", beta=">= 0", max_grad_norm="> 0",
        )
        schedule(self.learning_rate, "learning_rate")
        training.check_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        training.check_choice("std", self.std, ("sample", "population"))
        training.check_choice("loss_type", self.loss_type, LOSS_TYPES)
        level = self.importance_sampling_level
        training.check_choice("importance_sampling_level", level, ("token", "sequence"))
        training.check_choice("kl_in", self.kl_in, ("loss", "reward"))
        training.check_choice("kl_estimator", self.kl_estimator, tuple(ESTIMATORS))
        if self.batch_size is not None and self.batch_size % self.num_generations:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of num_generations="
                f"{self.num_generations}: a group is never split over minibatches"
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' divides by a constant: give max_completion_length")
        if self.delta is not None and self.delta <= 1.0 + self.upper_epsilon:
            raise ValueError(f"delta={self.delta} must exceed 1 + epsilon_high = {1.0 + self.upper_epsilon}")
        if self.use_bias_correction_kl and self.kl_in == "reward":
            raise ValueError("use_bias_correction_kl corrects the KL in the loss: kl_in='reward' needs none")

    @property
    def upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def grpo_loss(evaluation: Evaluation, batch: Batch, config: GRPOConfig) -> LossTerms:
    """``sum over steps of weights * (clipped loss + beta * KL)``, mean over completions.

    Source: Shao et al. (2024), eq. 3.

    Args:
        evaluation: the current policy on the batch, with gradient, each field [B, K].
        batch: completions, with mask and weights.
    """
    mask, weights = batch.mask, batch.weights
    assert mask is not None and weights is not None
    logp, old_logp = evaluation.log_prob, batch.old_log_probs
    log_ratio = logp - old_logp
    if config.importance_sampling_level == "sequence":
        log_ratio = sequence_log_ratio(logp, old_logp, mask)
    surrogate = clipped_loss(
        log_ratio, torch.zeros(()), batch.advantages, config.epsilon, config.epsilon_high, config.delta
    )
    policy = weighted_loss(surrogate.loss, weights)
    total, kl = policy, torch.zeros(())
    if config.beta > 0 and config.kl_in == "loss":
        assert batch.ref_log_probs is not None
        estimate = ESTIMATORS[config.kl_estimator](logp, batch.ref_log_probs)
        if config.use_bias_correction_kl:
            # k2 already has the right gradient on-policy: it needs only the weight, see `agents.kl`.
            weight_logp = logp.detach() if config.kl_estimator == "k2" else logp
            estimate = bias_corrected(estimate, weight_logp, old_logp)
        kl = weighted_loss(estimate, weights)
        total = policy + config.beta * kl
    entropy = masked_mean(evaluation.entropy.detach(), mask)
    return LossTerms(total, policy, torch.zeros(()), entropy, kl, batch.steps(surrogate.ratio))


class GRPO:
    """GRPO on any Env or VectorEnv; groups share a task where the environment has tasks.

    Args:
        env: a Gymnasium Env or VectorEnv.
        seed: seeds weights, action sampling, minibatches and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
        config: fields of `GRPOConfig`.
    """

    algorithm = "grpo"

    learn = on_policy.learn
    predict = on_policy.predict
    action_probabilities = on_policy.action_probabilities
    save = on_policy.save
    load = classmethod(on_policy.load)

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(GRPOConfig, config)
        parts = on_policy.build(self.config, env, seed, reference)
        self.env, self.generator, self.policy, self.optimizer, self.reference, self.collector = parts
        self.num_timesteps = self.n_updates = 0

    def collect(self) -> Rollout:
        """``num_generations`` episodes of each of ``n_groups`` tasks.

        With dynamic sampling more are drawn, until that many groups have unequal rewards.
        """
        cfg = self.config
        rollouts: list[Rollout] = []
        missing = cfg.n_groups
        for _ in range(MAX_ROUNDS if cfg.dynamic_sampling else 1):
            first = sum(len(r.episodes.returns) for r in rollouts) // cfg.num_generations
            rollouts.append(groups.collect_groups(self.collector, missing, cfg.num_generations, first))
            missing -= int((~no_signal(rollouts[-1])).sum())
            if missing == 0:
                break
        return concatenate(rollouts)

    def prepare(self, rollout: Rollout) -> Batch:
        """Rewards of whole episodes to advantages within groups, and the weight of each step."""
        cfg = self.config
        training.refuse_stale(rollout, self.collector)
        if cfg.beta > 0:
            training.reference_log_probs(rollout, cfg.beta)  # an error here, not in the loss
        rewards = groups.episode_rewards(rollout, cfg.beta if cfg.kl_in == "reward" else 0.0)
        ids = groups.group_ids(rollout)
        std = None if cfg.scale_rewards == "none" else cfg.std
        scale = "batch" if cfg.scale_rewards == "batch" else "group"
        advantages = group_advantages(rewards, ids, std, cfg.std_eps, scale)

        batch = groups.group_batch(rollout, advantages, rewards)
        if cfg.mask_truncated_completions:
            assert batch.mask is not None
            cut = torch.from_numpy(rollout.episodes.cut)[torch.argsort(ids, stable=True)]
            batch = replace(batch, mask=batch.mask & ~cut.unsqueeze(1))
        if cfg.dynamic_sampling:
            kept = (~no_signal(rollout)).repeat_interleave(cfg.num_generations)
            batch = batch.select(kept.nonzero().flatten())
        return self._weighted(batch)

    def _weighted(self, batch: Batch) -> Batch:
        assert batch.mask is not None
        weights = loss_weights(batch.mask, self.config.loss_type, self.config.max_completion_length)
        return replace(batch, weights=weights)

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> LossTerms:
        """`grpo_loss` of the current policy on a batch."""
        return grpo_loss(evaluate(self.policy, batch), batch, self.config)

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """The minibatches of an update: ``num_iterations`` times every group once, shuffled each time."""
        cfg = self.config
        members = torch.arange(len(batch)).view(-1, cfg.num_generations)  # [groups, members]
        per_step = len(members) if cfg.batch_size is None else cfg.batch_size // cfg.num_generations
        for _ in range(cfg.num_iterations):
            if per_step >= len(members):  # sums over all samples do not depend on their order
                yield batch
                continue
            for chosen in torch.randperm(len(members), generator=self.generator).split(per_step):
                part = batch.select(members[chosen].flatten())
                yield self._weighted(part) if cfg.loss_type == "bnpo" else part

    def update(self, rollout: Rollout, progress_remaining: float = 1.0) -> dict[str, float]:
        """One GRPO update: num_iterations over the rollout in minibatches. Returns its metrics."""
        cfg = self.config
        batch = self.prepare(rollout)
        learning_rate = schedule(cfg.learning_rate)(progress_remaining)
        training.set_learning_rate(self.optimizer, learning_rate)

        history: list[LossTerms] = []
        clipped: list[Tensor] = []
        grad_norms: list[float] = []
        for part in self.minibatches(batch):
            if not bool(part.steps(torch.ones_like(part.advantages)).any()):
                continue  # every step is masked: there is nothing to learn, and no step is taken
            terms = self.loss(part, progress_remaining)
            grad_norms.append(training.gradient_step(terms.total, self.optimizer, cfg.max_grad_norm))
            history.append(terms.detach())
            clipped.append(clipped_steps(terms.ratio.detach(), part.steps(part.advantages), cfg))
        self.n_updates += len(history)
        self.collector.policy_version += 1

        metrics = groups.group_metrics(rollout.episodes) | training.rollout_metrics(self.collector) | {
            "time/total_timesteps": self.num_timesteps,
            "train/learning_rate": learning_rate,
            "train/n_updates": self.n_updates,
        }
        if not history:
            return metrics
        low, high = torch.cat(clipped, dim=1).float().mean(1).tolist()
        return metrics | training.mean_terms(history) | training.kl_ref(batch) | {
            "train/grad_norm": sum(grad_norms) / len(grad_norms),
            "train/clip_fraction": low + high,
            "train/clip_fraction_low": low,
            "train/clip_fraction_high": high,
        }


def no_signal(rollout: Rollout) -> Tensor:
    """Groups whose episodes all have the same return, bool [G]."""
    return equal_groups(torch.from_numpy(rollout.episodes.returns), groups.group_ids(rollout))


def clipped_steps(ratio: Tensor, advantages: Tensor, config: GRPOConfig) -> Tensor:
    """Steps whose gradient the clip stops below and above, bool [2, S]; ratio and advantages [S]."""
    low = (ratio < 1.0 - config.epsilon) & (advantages < 0)
    high = (ratio > 1.0 + config.upper_epsilon) & (advantages > 0)
    return torch.stack([low, high])
