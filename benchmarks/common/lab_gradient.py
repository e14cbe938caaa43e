"""Gradients of every estimator on sampled groups, by the package's own functions, beside `common.lab_theory`.

One estimate uses one group of G answers of every prompt. Estimates are drawn in `PARTS` independent parts,
whose spread gives the standard errors of what is not a mean over estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.advantages import greedy_baseline, group_advantages, leave_one_out, whiten
from agents.losses import policy_gradient_loss
from common import lab_theory as theory
from common.compare import Comparison, compare
from llmgym import AnswerPool

POOLS = ("binary", "real")
N_PROMPTS = 64
PARTS = 40
N_ANSWERS = {"binary": 16, "real": 4}  # four distinct rewards: few enough to sum over all counts of 64


def make_pool(name: str) -> AnswerPool:
    """ "binary": rewards 0 and 1, pass rates from 2% to 98%. "real": standard normal rewards."""
    if name == "binary":
        return theory.binary_pool(N_PROMPTS, N_ANSWERS[name], seed=0)
    return AnswerPool.random(N_PROMPTS, N_ANSWERS[name], seed=0, ref_spread=1.0)


@dataclass(frozen=True)
class Result:
    """One estimator at one group size, on one pool, beside its analytic values.

    | field | meaning |
    |---|---|
    | `length` | of the mean along dE[r]/dlogits, in units of its norm |
    | `cosine` | between the mean and dE[r]/dlogits, over all prompts |
    | `own_length` | along the gradient of the own objective; 1 if that is right |
    | `own_bias` | squared distance of the mean from it, by its squared norm, without the sampling noise; 0 |
    | `variance` | trace |
    | `noise` | variance times sampled answers a prompt, by the mean's squared norm: at equal samples |
    | `exact` | analytic values are exact; else those of a large batch |
    | `weights` | of each prompt: the mean along its own dE[r]/dlogits, measured, [P] |
    """

    pool: str
    group_size: int
    estimator: str
    objective: str
    exact: bool
    length: Comparison
    cosine: Comparison
    own_length: Comparison
    own_bias: Comparison
    variance: Comparison
    noise: Comparison
    weights: list[float]


def sample_actions(policy: np.ndarray, group_size: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Groups of answers of every prompt, [n, P, G]."""
    uniform = rng.random((n, len(policy), group_size))
    cumulative = policy.cumsum(axis=1)
    drawn = np.stack([np.searchsorted(c, uniform[:, x]) for x, c in enumerate(cumulative)], axis=1)
    return np.minimum(drawn, policy.shape[1] - 1)  # the last sum may be short of 1 by rounding


def advantages(estimator: str, pool: AnswerPool, policy: np.ndarray, actions: np.ndarray) -> Tensor:
    """Advantage of every answer, [n, P, G]: each of the n a batch of its own."""
    rewards = torch.from_numpy(pool.proxy[np.arange(pool.n_prompts)[:, None], actions])
    n, n_prompts, group_size = rewards.shape
    if estimator == "REINFORCE":
        return rewards
    if estimator in ("REINFORCE, batch mean", "PPO, whitened", "GRPO, batch std"):
        groups = torch.arange(n_prompts).repeat_interleave(group_size)
        critic = torch.from_numpy((policy * pool.proxy).sum(axis=1))[:, None]
        return torch.stack([_batch_advantages(estimator, batch, groups, critic) for batch in rewards])
    groups = torch.arange(n * n_prompts).repeat_interleave(group_size)
    flat = rewards.flatten()
    if estimator == "ReMax":
        greedy = pool.proxy[np.arange(n_prompts), policy.argmax(axis=1)]
        flat = greedy_baseline(flat, groups, np.tile(greedy, n), np.arange(n * n_prompts))
    elif estimator == "RLOO":
        flat = leave_one_out(flat, groups)
    elif estimator in ("GRPO, no std", "GRPO, group std"):
        std = "sample" if estimator == "GRPO, group std" else None
        flat = group_advantages(flat, groups, std, theory.STD_EPS)
    else:
        raise ValueError(f"estimator {estimator!r} is not one of {', '.join(theory.ESTIMATORS)}")
    return flat.view(rewards.shape)


def _batch_advantages(estimator: str, rewards: Tensor, groups: Tensor, critic: Tensor) -> Tensor:
    """What needs the whole batch, [P, G]; critic: V of each prompt, [P, 1]."""
    if estimator == "REINFORCE, batch mean":
        return rewards - rewards.mean()
    if estimator == "PPO, whitened":
        return whiten(rewards - critic, ddof=1)
    return group_advantages(rewards.flatten(), groups, "sample", theory.STD_EPS, "batch").view(rewards.shape)


def gradients(policy: np.ndarray, actions: np.ndarray, advantage: Tensor) -> np.ndarray:
    """Estimates in the logits of every prompt by autograd, [n, P, A]; a prompt's is a mean over its group."""
    logits = torch.tensor(np.log(policy)).expand(len(actions), -1, -1).clone().requires_grad_()
    logp = torch.log_softmax(logits, -1).gather(2, torch.from_numpy(actions))
    loss = policy_gradient_loss(logp, advantage).mean(dim=2).sum()
    return -torch.autograd.grad(loss, logits)[0].numpy()


def measure(
    name: str, pool: AnswerPool, estimator: str, group_size: int, batches: list[np.ndarray]
) -> Result:
    """Estimates on the sampled actions of each part ([n, P, G] each), beside the analytic values."""
    policy = pool.ref_probs
    exact = theory.moments(estimator, pool, policy, group_size)
    reward = theory.reward_gradient(pool, policy)
    estimates = np.stack([gradients(policy, a, advantages(estimator, pool, policy, a)) for a in batches])
    by_part = estimates.mean(axis=1).reshape(len(batches), -1)  # [parts, P * A]
    flat = estimates.reshape(-1, exact.mean.size)
    target, own = reward.ravel(), exact.mean.ravel()
    centre = by_part.mean(axis=0)
    variance = compare(
        exact.variance.sum(), ((flat - centre) ** 2).sum(axis=1) * (len(flat) / (len(flat) - 1))
    )
    samples = group_size + (estimator == "ReMax")  # its greedy answer is sampled too
    norm = float(own @ own)
    return Result(
        pool=name,
        group_size=group_size,
        estimator=estimator,
        objective=objective(estimator, name, group_size),
        exact=exact.exact,
        length=compare(float(own @ target / (target @ target)), flat @ target / (target @ target)),
        cosine=_jackknife(
            float(own @ target / np.sqrt(norm * (target @ target))), by_part, lambda m: _cosine(m, target)
        ),
        own_length=compare(1.0, flat @ own / norm),
        own_bias=_jackknife(0.0, by_part, lambda m: _squared_norm(m - own) / norm),
        variance=variance,
        noise=_scaled(variance, samples / norm),
        weights=list((centre.reshape(reward.shape) * reward).sum(axis=1) / (reward**2).sum(axis=1)),
    )


def objective(estimator: str, pool: str, group_size: int) -> str:
    """The objective in a few words, see `common.lab_theory`."""
    if estimator != "GRPO, group std":
        return theory.OBJECTIVES[estimator]
    if pool == "binary":
        return "E[r]" if group_size <= 3 else "F_G(p)"
    return "win rate against itself" if group_size == 2 else "none (a field with curl)"


def _squared_norm(means: np.ndarray) -> float:
    """|E m|^2 from independent means [parts, D]: products of different ones, whose noise drops out."""
    total = means.sum(axis=0)
    n = len(means)
    return float((total @ total - (means**2).sum()) / (n * (n - 1)))


def _cosine(means: np.ndarray, target: np.ndarray) -> float:
    norm = np.sqrt(max(_squared_norm(means), 1e-300) * (target @ target))
    return float(means.mean(axis=0) @ target / norm)


def _jackknife(analytic: float, means: np.ndarray, statistic: Any) -> Comparison:
    """A statistic of the means of the parts, with its jackknife standard error."""
    n = len(means)
    value = statistic(means)
    left_out = np.array([statistic(np.delete(means, s, axis=0)) for s in range(n)])
    error = float(np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()))
    return Comparison(analytic, value, error, (value - analytic) / error)


def _scaled(c: Comparison, factor: float) -> Comparison:
    return Comparison(c.analytic * factor, c.measured * factor, c.standard_error * factor, c.z)


def gradient_job(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All estimators on one pool at one group size. For ``common.runner.run_jobs``."""
    pool = make_pool(config["pool"])
    group_size = config["group_size"]
    n = max(1, config["answers"] // (pool.n_prompts * group_size * PARTS))
    rng = np.random.default_rng(config["seed"])
    batches = [sample_actions(pool.ref_probs, group_size, n, rng) for _ in range(PARTS)]
    results = [measure(config["pool"], pool, e, group_size, batches) for e in theory.ESTIMATORS]
    return {"estimates": n * PARTS, "results": results}
