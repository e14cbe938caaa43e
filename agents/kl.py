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

All of this supposes that the samples were drawn from the p that is differentiated. `bias_corrected`
weighs them by the probability ratio, which holds after p has moved on too.

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


def bias_corrected(kl: Tensor, logp: Tensor, old_logp: Tensor) -> Tensor:
    """``exp(logp - old_logp) * kl``: an estimator for p from actions sampled from an older policy.

    The mean over the older policy is then the mean over p, so k1 and k3 estimate KL(p || q) without
    bias, and because the ratio is differentiated as well, their expected *gradient* is that of
    KL(p || q), wherever p is. (Not so k2: it becomes the gradient of its own, biased mean. k2 needs
    the ratio without its gradient, ``bias_corrected(kl, logp.detach(), old_logp)``.) That changes the
    gradient on-policy too, where every ratio is 1 and the values are the same. The ratio is not
    clipped: far from the older policy the variance is large.

    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), "Unbiased KL Estimate", which TRL calls
    ``use_bias_correction_kl``; Tang and Munos, "On a few pitfalls in KL divergence gradient estimation
    for RL" (2025), on why the gradient of an estimator is not an estimator of the gradient.

    Args:
        kl: an estimator's values for actions sampled from the older policy, any shape.
        logp: their log-probs under p, with gradient, in the shape of kl.
        old_logp: their log-probs under the policy that they were sampled from, in the shape of kl.
    """
    return torch.exp(logp - old_logp) * kl


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
