"""Sample estimators of the Kullback-Leibler divergence between two policies.

Each function takes log-probs of the same actions under two distributions and returns one value per
action. With ``a ~ p`` (the distribution of the first argument) and ``logr = log q(a) - log p(a)``:

========  ==========================  ===========================================================
k1        ``-logr``                   unbiased for KL(p || q); negative for single samples
k2        ``logr**2 / 2``             biased, small where p and q are close; never negative
k3        ``exp(logr) - 1 - logr``    unbiased for KL(p || q); never negative
========  ==========================  ===========================================================

**They hold only for actions sampled from p.** Under another distribution none of them estimates
KL(p || q).

As a *loss* (differentiated with respect to p, with the samples held fixed and drawn from p) they
differ again: the expected gradient of k1 is zero, that of k2 is the gradient of KL(p || q), and that
of k3 is the gradient of the reverse divergence KL(q || p). So k3 in the loss does not have the
closed-form optimum ``q * exp(r / beta)`` as its fixed point; k1 in the *reward*, or k2 in the loss,
has.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html; the
gradients follow from the score-function identity E_p[grad log p] = 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``log p - log q`` of actions sampled from p; any shape, one value per action."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``(log p - log q)**2 / 2`` of actions sampled from p; any shape, one value per action."""
    return 0.5 * (logp - ref_logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)`` of actions sampled from p; any shape, one value per action."""
    logr = ref_logp - logp
    # expm1 keeps the difference of two nearly equal numbers exact where the policies are close.
    return torch.expm1(logr) - logr


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
