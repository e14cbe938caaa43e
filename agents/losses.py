"""Losses: pure, differentiable functions that return one value per sample.

Aggregate with `masked_mean`, whose denominator is the number of samples that count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ClippedLoss(NamedTuple):
    """Per-sample policy loss and the probability ratio ``pi_new(a|s) / pi_old(a|s)`` behind it."""

    loss: Tensor
    ratio: Tensor


def clipped_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    clip_low: float | None,
    clip_high: float | None = None,
    delta: float | None = None,
) -> ClippedLoss:
    """PPO's clipped surrogate, negated: ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)``.

    The gradient flows only where the unclipped term is the smaller one: for a positive advantage
    while ratio < 1 + high, for a negative one while ratio > 1 - low. The samples come from the policy
    that gave ``old_logp``.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; separate bounds
    as in Yu et al., "DAPO" (2025), eq. 10.

    Args:
        logp: log-probs of the sampled actions under the policy being trained, any shape.
        old_logp, advantages: the same shape, without gradient.
        clip_low, clip_high: clip range below and above 1; clip_high=None means clip_low, and
            clip_low=None does not clip at all (plain importance-weighted policy gradient).
        delta: upper bound of the ratio in the unclipped term: a negative advantage then costs at most
            ``-delta * A``, with no gradient beyond ("dual clip", Ye et al., "Mastering Complex Control
            in MOBA Games" (2020), eq. 5); must exceed 1 + clip_high. None: no bound.
    """
    ratio = torch.exp(logp - old_logp)
    surrogate = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    if clip_low is None:
        return ClippedLoss(-surrogate, ratio)
    high = clip_low if clip_high is None else clip_high
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + high) * advantages
    return ClippedLoss(-torch.minimum(surrogate, clipped), ratio)


def policy_gradient_loss(logp: Tensor, advantages: Tensor) -> Tensor:
    """``-log pi(a|s) * A`` per sample: its gradient is the likelihood-ratio policy gradient.

    Holds for actions sampled from the policy that is differentiated, so for one gradient step.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    return -logp * advantages


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None = None,
    clip_range: float | None = None,
) -> Tensor:
    """Half the squared error per sample, optionally clipped round the value stored at collection.

    Unclipped ``0.5 * (v - R)**2``; clipped ``0.5 * max((v - R)**2, (v_c - R)**2)`` with
    ``v_c = v_old + clip(v - v_old, -clip_range, clip_range)``: where the clipped branch is the larger
    one there is no gradient. ``old_values`` are those recorded with the rollout; recomputing them with
    the current network would switch the clipping off.

    Source: Schulman et al. (2016), section 5, for the trust region; the clipped form is that of
    OpenAI Baselines' PPO2.

    Args:
        values, returns, old_values: equal shapes; returns and old_values without gradient.
        clip_range: in the unit of the value; None does not clip.

    Raises:
        ValueError: a clip range without old values.
    """
    error = (values - returns).square()
    if clip_range is None:
        return 0.5 * error
    if old_values is None:
        raise ValueError("clip_range needs old_values, the values stored with the rollout")
    clipped = old_values + torch.clamp(values - old_values, -clip_range, clip_range)
    return 0.5 * torch.maximum(error, (clipped - returns).square())


def clip_fraction(ratio: Tensor, clip_low: float, clip_high: float | None = None) -> Tensor:
    """Per-sample 0/1: the ratio lies outside [1 - low, 1 + high], whatever the advantage's sign.

    (The share of samples whose *gradient* is clipped is smaller: that depends on the sign.)
    """
    high = clip_low if clip_high is None else clip_high
    return ((ratio < 1.0 - clip_low) | (ratio > 1.0 + high)).to(ratio.dtype)


def sequence_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """GSPO's log-ratio of a whole response, ``mean_t (log pi - log pi_old)``, for each of its steps.

    Takes the place of the step's own log-ratio: ``clipped_loss(sequence_log_ratio(...), 0, ...)``.

    Source: Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 7.

    Args:
        logp, old_logp, mask: [B, K].

    Returns:
        [B, K], the same number in each row, differentiable in logp.
    """
    total = torch.where(mask, logp - old_logp, 0.0).sum(-1, keepdim=True)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(logp)


LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "sum")


def loss_weights(mask: Tensor, loss_type: str, max_completion_length: int | None = None) -> Tensor:
    """Weight of each step when per-step losses become one: ``loss = sum(weights * losses) / B``.

    ===========  ======================  =========================================================
    loss_type    weight of a step        the loss is
    ===========  ======================  =========================================================
    "grpo"       1 / own length          mean over responses of the mean over their steps
    "dapo"       1 / mean length         mean over all steps of the batch this is computed for
    "bnpo"       as "dapo"               (computed for each minibatch anew by `agents.grpo`)
    "dr_grpo"    1 / a constant          sum over steps by a constant length: no length bias
    "sum"        1                       mean over responses of the sum over their steps, which has
                                         the policy gradient itself
    ===========  ======================  =========================================================

    "grpo" gives the steps of long responses less weight. A step that is masked leaves numerator and
    denominator alike, except that in "grpo" and "dr_grpo" a response masked as a whole still counts as
    one of B. With every step masked all weights are 0.

    Sources: "grpo" Shao et al., "DeepSeekMath" (2024), eq. 3; "dapo" Yu et al., "DAPO" (2025), eq. 8;
    "dr_grpo" Liu et al., "Understanding R1-Zero-Like Training" (2025), section 3.2; names as in TRL.

    Args:
        mask: [B, K], 1 where a step counts.
        max_completion_length: the constant of "dr_grpo".

    Returns:
        weights [B, K], 0 where mask is 0.

    Raises:
        ValueError: an unknown type, or "dr_grpo" without its constant.
    """
    weights = mask.to(torch.get_default_dtype())
    if loss_type == "sum":
        return weights
    if loss_type == "grpo":
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)
    if loss_type in ("dapo", "bnpo"):
        return weights * (len(mask) / weights.sum().clamp(min=1))
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' divides by a constant: give max_completion_length")
        return weights / max_completion_length
    raise ValueError(f"loss_type={loss_type!r} is unknown; allowed: {', '.join(LOSS_TYPES)}")


def weighted_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """``sum(weights * losses) / B``; what stands at weight 0 is not read, so it may be anything."""
    return torch.where(weights > 0, losses * weights, 0.0).sum() / max(len(losses), 1)


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the samples that count; 0 with a zero, finite gradient where none does.

    Args:
        x: any shape.
        mask: None (all count) or the shape of x, 1 where a sample counts.
    """
    if mask is None:
        return x.mean() if x.numel() else x.sum()
    mask = mask.bool()
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)
