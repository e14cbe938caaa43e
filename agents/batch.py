"""What an update works on: the executed steps of a rollout, and the terms of a loss over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from agents.rollout import Rollout


@dataclass
class Batch:
    """The executed steps of a rollout, [B, ...], with everything a loss needs and no gradient.

    ==================  ========  ================================================================
    field               shape     meaning
    ==================  ========  ================================================================
    observations        [B, ...]  encoded
    actions             [B, ...]  as sampled
    old_log_probs       [B]       of the policy that sampled them
    ref_log_probs       [B]       of the reference policy; None where nobody knows it
    advantages          [B]       of the algorithm's own kind
    returns             [B]       targets of the critic
    old_values          [B]       V at collection
    ==================  ========  ================================================================
    """

    observations: Tensor
    actions: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    returns: Tensor
    old_values: Tensor

    def __len__(self) -> int:
        return len(self.advantages)

    def select(self, index: Tensor) -> Batch:
        """The samples at ``index``: one index for every field, so that none is shuffled apart."""
        fields: dict[str, Any] = {k: None if x is None else x[index] for k, x in vars(self).items()}
        return Batch(**fields)


class LossTerms(NamedTuple):
    """Means over the samples of a batch; ``total`` carries the gradient, ratio is per sample [B]."""

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
    """Flatten a rollout, with advantages and returns [T, N], to its executed steps."""
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
