"""What an update works on: the executed steps of a rollout, and the terms of a loss over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agents.collector import PADDING
from agents.policies.base import Evaluation, Policy, reads_sequences
from agents.rollout import Rollout, steps_of_episodes


@dataclass
class Batch:
    """Samples with everything a loss needs and no gradient, in one of two layouts.

    A sample is an executed step, and fields are [B, ...]; or it is a whole episode of up to K steps, and
    fields are [B, K, ...] with a mask (the algorithms that compare episodes with each other, and every
    algorithm on a policy that reads sequences).

    ==================  ============  ============================================================
    field               shape         meaning
    ==================  ============  ============================================================
    observations        [B, ...]      encoded; of sequences [B, L], see `agents.rollout.Rollout`
    actions             [B, ...]      as sampled; of sequences -1 behind the end
    old_log_probs       [B]           of the policy that sampled them
    ref_log_probs       [B]           of the reference policy; None where nobody knows it
    advantages          [B]           of the algorithm's own kind
    returns             [B]           targets of the critic
    old_values          [B]           V at collection
    mask                None or       bool, the steps that count; None: all of them do
                        [B, K]
    weights             None or       of each step in the loss, ``sum(weights * loss) / B``; 0 where mask
                        [B, K]        is 0; None: the mean over the steps that count
    ==================  ============  ============================================================
    """

    observations: Tensor
    actions: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    returns: Tensor
    old_values: Tensor
    mask: Tensor | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.advantages)

    def select(self, index: Tensor) -> Batch:
        """The samples at ``index``: one index for every field, so that none is shuffled apart."""
        fields: dict[str, Any] = {k: None if x is None else x[index] for k, x in vars(self).items()}
        return Batch(**fields)

    def steps(self, x: Tensor) -> Tensor:
        """The steps of a field that count, as one axis."""
        return x if self.mask is None else x[self.mask]


class LossTerms(NamedTuple):
    """Means over the samples of a batch; ``total`` carries the gradient, ratio is per step that counts."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    ratio: Tensor

    def detach(self) -> LossTerms:
        """The numbers without the graph behind them."""
        return LossTerms(*(term.detach() for term in self))


def make_batch(rollout: Rollout, advantages: Tensor, returns: Tensor) -> Batch:
    """The executed steps of a rollout, with advantages and returns [T, N].

    One sample a step, or one an episode where the policy reads sequences.
    """
    if rollout.sequences:
        return episode_batch(rollout, advantages, returns)
    flat, ref = rollout.flat, rollout.ref_log_probs
    return Batch(
        observations=flat(rollout.observations),
        actions=flat(rollout.actions),
        old_log_probs=flat(rollout.log_probs),
        ref_log_probs=None if ref is None else flat(ref),
        advantages=flat(advantages),
        returns=flat(returns),
        old_values=flat(rollout.values),
    )


def episode_batch(rollout: Rollout, advantages: Tensor, returns: Tensor) -> Batch:
    """The episodes of a rollout as samples, in the order of its table; advantages and returns [T, N]."""
    index, mask = steps_of_episodes(rollout.episode_index, len(rollout.episodes.returns))

    def rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[index]

    def masked(x: Tensor) -> Tensor:
        return torch.where(mask, rows(x), 0.0)

    actions, ref = rows(rollout.actions), rollout.ref_log_probs
    return Batch(
        observations=rollout.observations if rollout.sequences else rows(rollout.observations),
        actions=torch.where(mask, actions, PADDING) if rollout.sequences else actions,
        old_log_probs=masked(rollout.log_probs),
        ref_log_probs=None if ref is None else masked(ref),
        advantages=masked(advantages),
        returns=masked(returns),
        old_values=masked(rollout.values),
        mask=mask,
    )


def evaluate(policy: Policy, batch: Batch) -> Evaluation:
    """The policy on a batch, with gradient: each field in the layout of ``batch.advantages``."""
    if batch.mask is None or reads_sequences(policy):
        return policy.evaluate(batch.observations, batch.actions)
    mask = batch.mask
    flat = policy.evaluate(batch.observations[mask], batch.actions[mask])
    return Evaluation(*(torch.zeros(mask.shape, dtype=x.dtype).masked_scatter(mask, x) for x in flat))
