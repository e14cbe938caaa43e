"""Action distributions as functions of a policy's raw output.

Plain functions on logits and means instead of distribution objects: they are called once per
environment step, where building objects would cost more than the network.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits with forbidden actions at minus infinity, so that their probability is exactly 0.

    Args:
        logits: [..., A].
        mask: [..., A], 1 where an action is allowed.

    Raises:
        ValueError: a row in which nothing is allowed.
    """
    mask = mask.bool()
    if not bool(mask.any(-1).all()):
        rows = torch.nonzero(~mask.any(-1).reshape(-1)).flatten().tolist()
        raise ValueError(f"action mask: no action is allowed in row(s) {rows}; at least one must be")
    return torch.where(mask, logits, -torch.inf)


def categorical_sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one action per row by inverse cumulative probability; logits [N, A] -> int64 [N]."""
    uniform = torch.rand((len(logits), 1), generator=generator, dtype=logits.dtype)
    return categorical_quantile(logits, uniform)


def categorical_quantile(logits: Tensor, uniform: Tensor) -> Tensor:
    """The action at cumulative probability ``uniform`` [N, 1] in [0, 1); logits [N, A] -> int64 [N].

    Logits that are NaN give A, which is no action: an environment refuses it.
    """
    cumulative = torch.softmax(logits, -1).cumsum_(-1)
    # Scaling by the total, rather than assuming 1, keeps rounding from drawing an action beyond the
    # last one that has any probability.
    draw = uniform * cumulative[:, -1:]
    return torch.searchsorted(cumulative, draw, right=True).squeeze(-1)


def categorical_log_prob_and_entropy(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of actions and entropy in nats; logits [N, A], actions int64 [N] -> [N], [N].

    Actions of probability 0 (masked) have log-prob -inf and contribute 0 to the entropy.
    """
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    # 0 * -inf is NaN, in the value and in the gradient; a finite stand-in gives 0 in both.
    finite = logp.clamp(min=torch.finfo(logp.dtype).min)
    return chosen, -(torch.exp(logp) * finite).sum(-1)


def gaussian_sample(mean: Tensor, log_std: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from a diagonal Gaussian; mean [N, D], log_std [D] -> [N, D]."""
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
    return mean + torch.exp(log_std) * noise


def gaussian_log_prob(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Log-density summed over dimensions; mean and actions [N, D], log_std [D] -> [N]."""
    z = (actions - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - LOG_SQRT_2PI).sum(-1)


def gaussian_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Differential entropy in nats; the same for every row of mean [N, D] -> [N]."""
    return (log_std + 0.5 + LOG_SQRT_2PI).sum(-1).expand(len(mean))
