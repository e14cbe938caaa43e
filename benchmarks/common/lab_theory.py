"""Exact mean and variance of each estimator's gradient on an answer pool, and the objective it belongs to.

A prompt has answers a with probabilities pi(a) = softmax(logits) and rewards r(a); s(a) = onehot(a) - pi is
the gradient of log pi(a) in the logits, J = E[r] and g = dJ/dlogits = E[r s]. An estimate from a group of G
answers is `1/G sum_i A_i s(a_i)`; estimators differ in A. Because E[s] = 0:

    A_i = r_i - b, b independent of a_i      mean g                objective E[r]
      (no baseline, ReMax, leave-one-out)
    A_i = r_i - mean of the group            mean (1 - 1/G) g      E[r]; the own reward is in the mean
    A_i = (r_i - mean) / std of the batch    about (1 - 1/G) g / sigma_batch: one factor for all prompts, so
                                             E[r] and another step size
    A_i = (r_i - mean) / std of the group    another objective, or none:

**Rewards 0 and 1, pass rate p.** Exchange the sum over answers for one over the number k of right ones; what
is left is a multiple of g = dp/dlogits,

    w_G(p) = (1 - 1/G) E[1 / sigma(1 + m)],    m ~ Binomial(G - 2, p),

with sigma(k) the deviation of a group with k right answers: of a group that is known to hold a right and a
wrong one. So the objective of a prompt is F_G with derivative w_G,

    F_G(p) = E[u_G(m)],  m ~ Binomial(G - 1, p),    u_G(m) = 1/G sum_{k=1..m} 1 / sigma(k).

G = 2 and 3: sigma is the same for every group that has one, so F_G is proportional to p and dividing changes
the step size only. G to infinity: w = 1 / sqrt(p (1 - p)) and F = 2 arcsin(sqrt(p)), which is steepest for
prompts that are nearly solved or nearly hopeless. In between the weight is bounded: it ends at
(G - 1) / sqrt(G) at p = 0 and p = 1 (sample deviation), because a group without a right answer says nothing.

**Other rewards.** The group is summarised by its counts n_l of each distinct reward (multinomial), and the
mean is a sum over counts. At G = 2 the advantages are +c and -c whatever the rewards are: the mean is the
gradient of the probability of beating an opponent, the policy as it is now, who is held fixed; only the order
of the rewards counts. For large G the mean tends to g / sigma with sigma the prompt's own deviation under pi.
That depends on pi not through J alone, so this field has a curl: it is no objective's gradient.

Variances are traces, exact likewise: given the counts, answers of one reward are drawn independently.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import gammaln
from scipy.stats import binom

from llmgym import AnswerPool

STD_EPS = 1e-4  # as in agents.advantages.group_advantages
OBJECTIVES = {
    "REINFORCE": "E[r]",
    "REINFORCE, batch mean": "E[r]",
    "PPO, whitened": "E[r] (limit)",
    "ReMax": "E[r]",
    "RLOO": "E[r]",
    "GRPO, no std": "E[r]",
    "GRPO, batch std": "E[r] (limit)",
    "GRPO, group std": "F_G(p)",
}
ESTIMATORS = tuple(OBJECTIVES)
CENTRED = ("RLOO", "GRPO, no std", "GRPO, batch std", "GRPO, group std")


def binary_pool(n_prompts: int, n_answers: int, seed: int, spread: float = 4.0) -> AnswerPool:
    """Prompts with right and wrong answers, the reference's pass rates from very low to very high.

    A quarter of the answers is right; the log-odds of the pass rate go from -spread to spread in equal steps,
    and the shares of the answers among the right and among the wrong ones are random. Gold is the reward too.
    """
    rng = np.random.default_rng(seed)
    n_right = max(1, n_answers // 4)
    right = np.zeros((n_prompts, n_answers))
    right[:, :n_right] = 1.0
    right = rng.permuted(right, axis=1)
    weights = np.exp(0.5 * rng.standard_normal(right.shape))
    pass_rate = 1 / (1 + np.exp(-np.linspace(-spread, spread, n_prompts)))[:, None]
    of_right = weights * right / (weights * right).sum(axis=1, keepdims=True)
    of_wrong = weights * (1 - right) / (weights * (1 - right)).sum(axis=1, keepdims=True)
    return AnswerPool(right, right, pass_rate * of_right + (1 - pass_rate) * of_wrong)


@dataclass(frozen=True)
class Levels:
    """The distinct rewards of each prompt: rewards and probabilities [P, L], pi(a | reward) [P, L, A]."""

    rewards: np.ndarray
    probabilities: np.ndarray
    given: np.ndarray


def levels(pool: AnswerPool, policy: np.ndarray) -> Levels:
    """Answers sorted by reward.

    Raises:
        ValueError: prompts have different numbers of distinct rewards.
    """
    distinct = [np.unique(row) for row in pool.proxy]
    if len({len(row) for row in distinct}) > 1:
        sizes = sorted({len(row) for row in distinct})
        raise ValueError(f"prompts have {sizes} distinct rewards; allowed: the same number in all")
    rewards = np.stack(distinct)
    joint = (pool.proxy[:, None, :] == rewards[:, :, None]) * policy[:, None, :]
    probabilities = joint.sum(axis=2)
    return Levels(rewards, probabilities, joint / probabilities[:, :, None])


@dataclass(frozen=True)
class Moments:
    """Of each prompt's estimate: mean [P, A], variance [P] (trace); ``exact``, or a large batch's limit."""

    mean: np.ndarray
    variance: np.ndarray
    exact: bool


def reward_gradient(pool: AnswerPool, policy: np.ndarray) -> np.ndarray:
    """dE[r]/dlogits of each prompt, [P, A]; not divided by the number of prompts."""
    return pool.policy_gradient(np.log(policy), 0.0) * pool.n_prompts


def moments(estimator: str, pool: AnswerPool, policy: np.ndarray, group_size: int) -> Moments:
    """Of an estimate from one group of every prompt; the batch is ``P * group_size`` answers."""
    if estimator in CENTRED:
        return _centred_moments(estimator, pool, policy, group_size)
    gradient = reward_gradient(pool, policy)
    n_batch = pool.n_prompts * group_size
    expected = (policy * pool.proxy).sum(axis=1)
    within = ((policy * pool.proxy**2).sum(axis=1) - expected**2).mean()
    baseline, factor, exact = {
        "REINFORCE": (np.zeros(pool.n_prompts), 1.0, True),
        "REINFORCE, batch mean": (np.full(pool.n_prompts, expected.mean()), 1 - 1 / n_batch, False),
        "PPO, whitened": (expected, 1 / np.sqrt(within), False),
        "ReMax": (pool.proxy[np.arange(pool.n_prompts), policy.argmax(axis=1)], 1.0, True),
    }[estimator]
    squared_score = 1 - 2 * policy + (policy**2).sum(axis=1, keepdims=True)
    second = (policy * (pool.proxy - baseline[:, None]) ** 2 * squared_score).sum(axis=1)
    variance = (second - (gradient**2).sum(axis=1)) / group_size
    return Moments(factor * gradient, factor**2 * variance, exact)


def _centred_moments(estimator: str, pool: AnswerPool, policy: np.ndarray, group_size: int) -> Moments:
    """Advantages that sum to zero in each group: a sum over the counts of each distinct reward."""
    parts = levels(pool, policy)
    counts = compositions(group_size, parts.rewards.shape[1])  # [M, L]
    exact = estimator != "GRPO, batch std" or parts.rewards.shape[1] == 2
    if estimator == "GRPO, batch std" and exact:
        scale, scale2 = _batch_scale(parts.probabilities[:, 1], group_size)  # [P, G + 1]
        scale, scale2 = scale[:, counts[:, 1]], scale2[:, counts[:, 1]]
    mean, variance = np.empty_like(policy), np.empty(pool.n_prompts)
    for row in range(pool.n_prompts):
        rewards, given = parts.rewards[row], parts.given[row]
        weights = multinomial(counts, parts.probabilities[row])  # [M]
        centred = rewards - (counts @ rewards / group_size)[:, None]  # [M, L]
        if estimator == "GRPO, group std":
            deviation = np.sqrt((counts * centred**2).sum(axis=1) / (group_size - 1))
            centred = centred / (deviation + STD_EPS)[:, None]
        first = second = weights
        if estimator == "RLOO":
            centred = centred * group_size / (group_size - 1)
        elif estimator == "GRPO, batch std" and exact:
            first, second = weights * scale[row], weights * scale2[row]
        of_level = first @ (counts * centred) / group_size
        mean[row] = of_level @ given
        same = (given**2).sum(axis=1)  # probability that two answers of one reward are one answer
        squares = second @ (centred**2 * (counts + counts * (counts - 1) * same))
        variance[row] = squares.sum() / group_size**2 - mean[row] @ mean[row]
    if not exact:
        factor = 1 / total_deviation(pool, policy)
        mean, variance = factor * mean, factor**2 * variance
    return Moments(mean, variance, exact)


def total_deviation(pool: AnswerPool, policy: np.ndarray) -> float:
    """Standard deviation of the reward over prompts and answers: that of a large batch."""
    return float(np.sqrt(pool_mean(policy, pool.proxy**2) - pool_mean(policy, pool.proxy) ** 2))


def pool_mean(policy: np.ndarray, table: np.ndarray) -> float:
    """E_x E_a of a table [P, A]."""
    return float((policy * table).sum(axis=1).mean())


def _batch_scale(pass_rates: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """E[1/sigma] and E[1/sigma^2] of a batch of one group a prompt, given k right in the own; [P, G + 1].

    The number of right answers in the other groups is a sum of independent binomials: a convolution.
    """
    own = [binom.pmf(np.arange(group_size + 1), group_size, p) for p in pass_rates]
    before, behind = [np.ones(1)], [np.ones(1)]
    for pmf in own[:-1]:
        before.append(np.convolve(before[-1], pmf))
    for pmf in own[:0:-1]:
        behind.append(np.convolve(behind[-1], pmf))
    n = group_size * len(pass_rates)
    total = np.arange(n + 1)
    deviation = np.sqrt(total * (n - total) / (n * (n - 1)))
    scale = np.where(deviation > 0, 1 / (deviation + STD_EPS), 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(scale, n - group_size + 1)  # [G + 1, n - G + 1]
    others = [np.convolve(a, b) for a, b in zip(before, behind[::-1], strict=True)]
    return np.stack([windows @ o for o in others]), np.stack([windows**2 @ o for o in others])


def compositions(total: int, parts: int) -> np.ndarray:
    """All ways to write ``total`` as a sum of ``parts`` counts, [M, parts]."""
    bars = np.array(list(combinations(range(total + parts - 1), parts - 1)), dtype=np.int64)
    ends = np.full((len(bars), 1), total + parts - 1)
    return np.diff(np.hstack([np.full_like(ends, -1), bars.reshape(-1, parts - 1), ends]), axis=1) - 1


def multinomial(counts: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Probability of each row of counts, [M]."""
    log_ways = gammaln(counts[0].sum() + 1) - gammaln(counts + 1).sum(axis=1)
    return np.exp(log_ways + counts @ np.log(probabilities))


def group_deviation(group_size: int) -> np.ndarray:
    """Sample deviation plus epsilon of a group with k = 1 .. G - 1 right answers, [G - 1]."""
    k = np.arange(1, group_size)
    return np.sqrt(k * (group_size - k) / (group_size * (group_size - 1))) + STD_EPS


def prompt_weight(pass_rate: np.ndarray, group_size: int | None) -> np.ndarray:
    """w_G(p): factor of dp/dlogits when rewards 0 and 1 are divided by the group's deviation; [...].

    ``group_size=None``: the limit 1 / sqrt(p (1 - p)).
    """
    p = np.asarray(pass_rate, dtype=float)
    if group_size is None:
        return 1 / np.sqrt(p * (1 - p))
    others = binom.pmf(np.arange(group_size - 1), group_size - 2, p[..., None])
    return (1 - 1 / group_size) * (others / group_deviation(group_size)).sum(axis=-1)


def prompt_objective(pass_rate: np.ndarray, group_size: int | None) -> np.ndarray:
    """F_G(p), the objective with that derivative and F_G(0) = 0; None: 2 arcsin(sqrt(p))."""
    p = np.asarray(pass_rate, dtype=float)
    if group_size is None:
        return 2 * np.arcsin(np.sqrt(p))
    at_least = binom.sf(np.arange(group_size - 1), group_size - 1, p[..., None])  # k = 1 .. G - 1
    return (at_least / group_deviation(group_size)).sum(axis=-1) / group_size
