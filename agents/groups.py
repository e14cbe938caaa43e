"""Groups of completions: several whole episodes of one task, which RLOO, ReMax and GRPO compare.

    draw tasks --> one episode per task and member --> one reward per episode --> advantage per episode

Tasks are drawn by the environment and given back to it with ``reset(options={"task_id": ...})``. An
environment without task ids, such as CartPole, is one task.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agents import training
from agents.advantages import equal_groups, kl_in_reward
from agents.batch import Batch, LossTerms, episode_batch, evaluate
from agents.collector import Collector
from agents.losses import loss_weights, masked_mean, policy_gradient_loss, weighted_loss
from agents.policies.base import Policy
from agents.rollout import Episodes, Rollout


def collect_groups(collector: Collector, n_groups: int, group_size: int, first: int = 0) -> Rollout:
    """``group_size`` episodes of each of ``n_groups`` drawn tasks; groups are numbered from ``first``."""
    tasks = collector.draw_tasks(n_groups)
    group_ids = np.arange(first, first + n_groups)
    return collector.collect_tasks(tasks.repeat(group_size), group_ids.repeat(group_size))


def episode_rewards(rollout: Rollout, beta: float = 0.0) -> Tensor:
    """The reward of each episode, less ``beta * k1`` summed over its steps; [E], undiscounted.

    Raises:
        ValueError: beta > 0 and nobody knows the reference.
    """
    rewards = rollout.rewards
    if beta > 0:
        reference = training.reference_log_probs(rollout, beta)
        rewards = kl_in_reward(rewards, rollout.log_probs, reference, beta)
    recorded = rollout.episode_index >= 0
    total = torch.zeros(len(rollout.episodes.returns), dtype=rewards.dtype)
    return total.index_add(0, rollout.episode_index[recorded], rewards[recorded])


def group_batch(rollout: Rollout, advantages: Tensor, rewards: Tensor) -> Batch:
    """The episodes of a rollout as samples, those of a group side by side.

    Args:
        advantages, rewards: [E], of an episode, the same for all its steps.
    """
    index = rollout.episode_index

    def spread(per_episode: Tensor) -> Tensor:
        return torch.where(index >= 0, per_episode[index.clamp(min=0)], 0.0)

    batch = episode_batch(rollout, spread(advantages), spread(rewards))
    return batch.select(torch.argsort(group_ids(rollout), stable=True))


def group_ids(rollout: Rollout) -> Tensor:
    """Group of each episode, [E]."""
    return torch.from_numpy(rollout.episodes.group_ids)


def sequence_gradient_loss(policy: Policy, batch: Batch, ent_coef: float) -> LossTerms:
    """``-A * sum_t log pi(a_t) - ent_coef * sum_t entropy``, mean over episodes.

    The sum over the steps, unlike a mean, is the log-prob of the episode: its gradient times the advantage
    is the policy gradient itself, not one that long episodes weigh less in.
    """
    assert batch.mask is not None
    evaluation = evaluate(policy, batch)
    losses = policy_gradient_loss(evaluation.log_prob, batch.advantages)
    weights = loss_weights(batch.mask, "sum")
    loss = weighted_loss(losses, weights)
    total = loss - ent_coef * weighted_loss(evaluation.entropy, weights) if ent_coef > 0 else loss
    entropy = masked_mean(evaluation.entropy.detach(), batch.mask)
    ratio = torch.exp(evaluation.log_prob - batch.old_log_probs).detach()
    zero = torch.zeros(())
    return LossTerms(total, loss, zero, entropy, zero, batch.steps(ratio))


def group_metrics(episodes: Episodes) -> dict[str, float]:
    """Rewards within and between groups, lengths, and the share of episodes that a limit cut."""
    returns, ids = torch.from_numpy(episodes.returns), torch.from_numpy(episodes.group_ids)
    _, group, counts = ids.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(counts), dtype=returns.dtype).index_add(0, group, returns) / counts
    squares = torch.zeros_like(means).index_add(0, group, (returns - means[group]).square())
    metrics = {
        "group/reward_mean": float(returns.mean()),
        "group/reward_std": float((squares / counts).sqrt().mean()),
        "group/no_signal": float(equal_groups(returns, ids).double().mean()),
        "group/length_mean": float(episodes.lengths.mean()),
        "group/cut": float(episodes.cut.mean()),
    }
    correct = episodes.info.get("correct", np.zeros(0))
    if np.isfinite(correct).any():
        metrics["group/pass_rate"] = float(np.nanmean(correct))
    return metrics
