"""What the KL estimators of `agents.kl` do in expectation, in closed form.

Nothing here samples, differentiates or calls `agents.kl`: these are the values that it is held against.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from llmgym import AnswerPool


def gaussian_kl(mu: float) -> float:
    """KL(q || p) of q = N(0, 1) and p = N(mu, 1), in nats: ``mu^2 / 2``."""
    return mu**2 / 2


def relative_bias(name: str, mu: float) -> float:
    """``E_q[k] / KL(q || p) - 1`` of the same pair, for samples from q.

    The log-ratio ``log p(x) - log q(x) = mu x - mu^2 / 2`` is normal with mean ``-mu^2 / 2`` and variance
    ``mu^2``, so ``E[k2] = (mu^2 + mu^4 / 4) / 2``; k1 and k3 have no bias.
    """
    return {"k1": 0.0, "k2": mu**2 / 4, "k3": 0.0}[name]


def relative_std(name: str, mu: float) -> float:
    """Standard deviation of k over KL(q || p), for samples from q.

    With the log-ratio of `relative_bias`: ``Var k1 = mu^2``; ``Var k2 = (2 mu^4 + mu^6) / 4``; and, the
    ratio itself being log-normal, ``Var k3 = exp(mu^2) - 1 - mu^2``.
    """
    variance = {"k1": mu**2, "k2": (2 * mu**4 + mu**6) / 4, "k3": np.expm1(mu**2) - mu**2}[name]
    return float(np.sqrt(variance) / gaussian_kl(mu))


def fourth_moment(name: str, mu: float) -> float:
    """Fourth central moment of k for samples from q, in nats^4: the deviation's own standard error.

    By Gauss-Hermite quadrature; a closed form exists and is long.
    """
    x, weights = np.polynomial.hermite_e.hermegauss(150)
    weights = weights / weights.sum()
    logr = mu * x - mu**2 / 2
    k = {"k1": -logr, "k2": logr**2 / 2, "k3": np.expm1(logr) - logr}[name]
    return float(weights @ (k - weights @ k) ** 4)


def divergence_gradient(direction: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Gradient ``[A]`` of "KL(p || q)" or "KL(q || p)" in the logits of p = softmax(logits)."""
    if direction == "KL(q || p)":
        return p - q
    log_ratio = np.log(p / q)
    return p * (log_ratio - p @ log_ratio)


def loss_gradient(
    name: str, p: np.ndarray, q: np.ndarray, samples_from: np.ndarray, ratio: str = "none"
) -> np.ndarray:
    """Expected gradient ``[A]``, in the logits of p, of an estimator as a loss.

    The gradient of log p(b) in the logits is ``1[a = b] - p(a)``, and that of a function of log p(b) its
    derivative times this. With weights w over the samples' distribution s, the sum over b is
    ``s(a) w(a) - p(a) sum_b s(b) w(b)``.

    Args:
        name: k1, k2 or k3, of which p is the first argument and q the reference; [A] each.
        samples_from: distribution of the actions, [A], held fixed.
        ratio: "none"; "differentiated", the factor p / s as `agents.kl.bias_corrected` has it; or "fixed",
            the same factor without its gradient.
    """
    log_ratio = np.log(p / q)
    slope = {"k1": np.ones_like(p), "k2": log_ratio, "k3": 1 - q / p}[name]
    if ratio == "differentiated":  # (p / s k)' = p / s (k + k')
        slope = slope + {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": q / p - 1 + log_ratio}[name]
    s = samples_from if ratio == "none" else p
    return s * slope - p * (s @ slope)


def k3_fixed_point(pool: AnswerPool, beta: float) -> np.ndarray:
    """The policy ``[P, A]`` at which training with beta * k3 in the loss comes to rest, on-policy.

    There k3's expected gradient is that of KL(ref || pi), so what is maximised is
    ``E_pi[r] - beta KL(ref || pi)``: concave in pi, with ``r(a) + beta ref(a) / pi(a) = lam`` for every
    answer at its maximum. Hence ``pi(a) = beta ref(a) / (lam - r(a))``, and lam is the one number above
    the largest reward for which these sum to 1. (The regularised policy of Grill et al., "Monte-Carlo
    tree search as regularized policy optimization", 2020.)

    Raises:
        ValueError: beta is not above 0.
    """
    if not beta > 0:
        raise ValueError(f"beta: got {beta!r}; allowed: a number > 0")
    policy = np.empty_like(pool.proxy)
    for row in range(pool.n_prompts):
        below_best, ref = pool.proxy[row].max() - pool.proxy[row], pool.ref_probs[row]
        # lam - max r lies between the value at which the best answer alone has probability 1 and the
        # one at which no answer has more than its share of the reference; a little room for rounding.
        low, high = beta * ref[below_best.argmin()] * (1 - 1e-9), beta * (1 + 1e-9)

        def excess(above_best: float, d: np.ndarray = below_best, q: np.ndarray = ref) -> float:
            return float((beta * q / (above_best + d)).sum() - 1)

        above_best = brentq(excess, low, high, xtol=1e-15)
        policy[row] = beta * ref / (above_best + below_best)
    return policy / policy.sum(axis=1, keepdims=True)
