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
    """
    ratio = torch.exp(logp - old_logp)
    surrogate = ratio * advantages
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
