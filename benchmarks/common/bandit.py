"""The policy gradient of a softmax policy over a few actions: five estimates and their exact moments.

A softmax policy over K actions with fixed rewards. Its expected reward J has the exact gradient

    g_k = pi_k * (r_k - J)                                            in the logits.

An estimate samples n actions and is the gradient of `agents.losses.policy_gradient_loss`,
`1/n sum_i (r_i - b_i) * s_i` with the score `s = onehot(a) - pi` and advantages from `agents.advantages`.
The baselines b_i:

    none            0
    exact           J
    batch mean      the mean of all n rewards, the sample's own among them
    leave-one-out   the mean of the other n - 1 rewards
    greedy          the reward of the likeliest action (ReMax)

A constant baseline leaves the mean at g, and the variance is that of one term divided by n: with X =
(r_a - b) * s_a it is `(E[X^2] - g^2) / n`, a sum over K actions. Leave-one-out is a U-statistic of pairs
with the kernel h(a, c) = (r_a - r_c) * (s_a - s_c) / 2, so it has mean g and the variance (Hoeffding, "A
class of statistics with asymptotically normal distribution", 1948, eq. 5.13)

    2 / (n (n - 1)) * (2 (n - 2) * Var[E[h | a]] + Var[h]),           sums over K and K^2 actions.

The batch mean's estimate is (1 - 1/n) times that of leave-one-out on the same samples: its mean is
(1 - 1/n) g, which is a bias, and its variance is smaller only because it is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agents.advantages import greedy_baseline, group_advantages, leave_one_out
from agents.losses import policy_gradient_loss

BASELINES = ("none", "exact", "batch mean", "leave-one-out", "greedy")


@dataclass(frozen=True)
class Bandit:
    """A policy over K actions and the reward of each: probabilities [K], rewards [K]."""

    probabilities: np.ndarray
    rewards: np.ndarray

    @property
    def expected_reward(self) -> float:
        return float(self.probabilities @ self.rewards)

    @property
    def gradient(self) -> np.ndarray:
        """The exact gradient of the expected reward in the logits, ``[K]``."""
        return self.probabilities * (self.rewards - self.expected_reward)

    @property
    def scores(self) -> np.ndarray:
        """The gradient of log pi(a) in the logits for every action a, ``[K, K]``, one row an action."""
        return np.eye(len(self.probabilities)) - self.probabilities

    def shifted(self, shift: float) -> Bandit:
        """The same policy, with `shift` added to all rewards."""
        return Bandit(self.probabilities, self.rewards + shift)


def make_bandit(n_actions: int, rng: np.random.Generator) -> Bandit:
    """Standard normal logits and rewards uniform in [0, 1]."""
    weights = np.exp(rng.normal(size=n_actions))
    return Bandit(weights / weights.sum(), rng.random(n_actions))


def advantages(baseline: str, bandit: Bandit, actions: np.ndarray) -> torch.Tensor:
    """Reward minus baseline of each sampled action, ``[R, n]`` to ``[R, n]``: one estimate a row."""
    rewards = torch.from_numpy(bandit.rewards[actions])
    if baseline == "none":
        return rewards
    if baseline == "exact":
        return rewards - bandit.expected_reward
    rows = torch.arange(len(actions))
    groups = rows.repeat_interleave(actions.shape[1])
    if baseline == "batch mean":
        flat = group_advantages(rewards.flatten(), groups, std=None)
    elif baseline == "leave-one-out":
        flat = leave_one_out(rewards.flatten(), groups)
    elif baseline == "greedy":
        greedy = bandit.rewards[bandit.probabilities.argmax()]
        flat = greedy_baseline(rewards.flatten(), groups, np.full(len(rows), greedy), rows)
    else:
        raise ValueError(f"baseline {baseline!r} is not one of {', '.join(BASELINES)}")
    return flat.reshape(rewards.shape)


def estimate_gradients(baseline: str, bandit: Bandit, actions: np.ndarray) -> np.ndarray:
    """Estimates of the gradient in the logits by autograd: actions ``[R, n]`` to ``[R, K]``."""
    rows = len(actions)
    logits = torch.tensor(np.log(bandit.probabilities)).expand(rows, -1).clone().requires_grad_()
    logp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(actions))
    loss = policy_gradient_loss(logp, advantages(baseline, bandit, actions))
    # A row's mean depends on its own logits only, so one backward gives all estimates.
    (gradient,) = torch.autograd.grad(loss.mean(dim=1).sum(), logits)
    return -gradient.numpy()


def analytic_mean(baseline: str, bandit: Bandit, n: int) -> np.ndarray:
    """Expectation of an estimate from n samples, ``[K]``."""
    return bandit.gradient * (1 - 1 / n if baseline == "batch mean" else 1.0)


def analytic_variance(baseline: str, bandit: Bandit, n: int) -> np.ndarray:
    """Variance of each component of an estimate from n samples, ``[K]``: see the module's docstring."""
    if baseline == "batch mean":
        return (1 - 1 / n) ** 2 * analytic_variance("leave-one-out", bandit, n)
    p, r, s, g = bandit.probabilities, bandit.rewards, bandit.scores, bandit.gradient
    if baseline == "leave-one-out":
        kernel = 0.5 * (r[:, None] - r[None, :])[..., None] * (s[:, None] - s[None, :])  # [K, K, K]
        given_one = np.einsum("c,ack->ak", p, kernel)
        of_one = p @ given_one**2 - g**2
        of_both = np.einsum("a,c,ack->k", p, p, kernel**2) - g**2
        return 2 / (n * (n - 1)) * (2 * (n - 2) * of_one + of_both)
    constants = {"none": 0.0, "exact": bandit.expected_reward, "greedy": float(r[p.argmax()])}
    terms = (r - constants[baseline])[:, None] * s
    return (p @ terms**2 - g**2) / n
