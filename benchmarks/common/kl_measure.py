"""Measurements of the KL estimators of `agents.kl`, each beside its value from `common.kl_theory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

import agents
from agents.kl import ESTIMATORS, bias_corrected
from common import kl_theory
from common.stats import Estimate, estimate
from llmgym import AnswerPool

# A policy of five actions, the older policy that sampled, and the reference: no two close to each other,
# so that no gradient is like another by chance.
POLICY = torch.log_softmax(torch.tensor([1.5, -1.0, 0.3, 0.8, -0.2], dtype=torch.float64), 0)
OLDER = torch.log_softmax(torch.tensor([0.2, 0.4, 0.9, -0.3, -1.0], dtype=torch.float64), 0)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.6, 0.1, 0.4, 0.9], dtype=torch.float64), 0)
SETTINGS = {"on-policy": ("none", "differentiated"), "moved": ("none", "differentiated", "fixed")}

# Arms of the training, with PPO's kl_in and kl_estimator.
ARMS = {
    "k1 in the reward": ("reward", "k1"),
    "k1 in the loss": ("loss", "k1"),
    "k2 in the loss": ("loss", "k2"),
    "k3 in the loss": ("loss", "k3"),
}


@dataclass(frozen=True)
class Moments:
    """Bias and standard deviation of one estimator over the true KL, with standard errors."""

    estimator: str
    mu: float
    kl: float
    bias_analytic: float
    bias_measured: float
    bias_error: float
    std_analytic: float
    std_measured: float
    std_error: float

    @property
    def errors_off(self) -> float:
        """The larger of the two distances from the analytic value, in standard errors."""
        return max(
            abs(self.bias_measured - self.bias_analytic) / self.bias_error,
            abs(self.std_measured - self.std_analytic) / self.std_error,
        )


@dataclass(frozen=True)
class Gradient:
    """The expected gradient [A] of one estimator as a loss, and the divergence whose gradient it is."""

    estimator: str
    samples: str
    ratio: str
    measured: np.ndarray
    analytic: np.ndarray
    gradient_of: str
    error: float
    """``|g - g_KL| / |g_KL|`` with g_KL the gradient of KL(p || q): 0 where g is the right one."""


@dataclass(frozen=True)
class FixedPoint:
    """Where the runs of one arm ended; measures are medians over runs."""

    arm: str
    runs: int
    predicted: str
    kl_opt: Estimate
    kl_k3: Estimate
    p_best: Estimate
    proxy: Estimate
    kl_opt_predicted: float
    kl_k3_predicted: float
    p_best_predicted: float
    proxy_predicted: float
    policies: np.ndarray
    """[runs, A]"""


def measure_moments(mu: float, n: int, generator: torch.Generator) -> list[Moments]:
    """Each estimator on `n` samples from q = N(0, 1), of KL(q || N(mu, 1))."""
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    kl = kl_theory.gaussian_kl(mu)
    rows = []
    for name, estimator in ESTIMATORS.items():
        # The densities' common factor drops out of the log-ratio.
        values = estimator(-0.5 * x.square(), -0.5 * (x - mu).square()) / kl
        bias, std = values.mean().item() - 1, values.std().item()
        exact = kl_theory.relative_std(name, mu)
        spread = kl_theory.fourth_moment(name, mu) / kl**4 - exact**4
        rows.append(
            Moments(
                name, mu, kl,
                kl_theory.relative_bias(name, mu), bias, exact / np.sqrt(n),
                exact, std, float(np.sqrt(spread / n) / (2 * exact)),
            )
        )  # fmt: skip
    return rows


def expected_gradient(name: str, samples: Tensor, ratio: str) -> np.ndarray:
    """Gradient [A] in POLICY's logits of the mean of an estimator over `samples` [A], by autograd."""
    logits = POLICY.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    kl = ESTIMATORS[name](logp, REFERENCE)
    if ratio != "none":
        kl = bias_corrected(kl, logp if ratio == "differentiated" else logp.detach(), samples)
    (samples.exp() * kl).sum().backward()
    assert logits.grad is not None
    return logits.grad.numpy()


def divergence_gradients() -> dict[str, np.ndarray]:
    """The exact gradients [A] of both divergences of POLICY and REFERENCE."""
    p, q = POLICY.exp().numpy(), REFERENCE.exp().numpy()
    return {name: kl_theory.divergence_gradient(name, p, q) for name in ("KL(p || q)", "KL(q || p)")}


def measure_gradients() -> list[Gradient]:
    """Every estimator with and without the ratio, on-policy and with samples from OLDER."""
    p, q = POLICY.exp().numpy(), REFERENCE.exp().numpy()
    targets = {"nothing (zero)": np.zeros_like(p)} | divergence_gradients()
    right = targets["KL(p || q)"]
    rows = []
    for setting, ratios in SETTINGS.items():
        samples = POLICY if setting == "on-policy" else OLDER
        for ratio in ratios:
            for name in ESTIMATORS:
                found = expected_gradient(name, samples, ratio)
                exact = kl_theory.loss_gradient(name, p, q, samples.exp().numpy(), ratio)
                of = [target for target, g in targets.items() if np.abs(found - g).max() < 1e-9]
                error = float(np.linalg.norm(found - right) / np.linalg.norm(right))
                rows.append(Gradient(name, setting, ratio, found, exact, of[0] if of else "neither", error))
    return rows


def train(beta: float, rounds: int, answers: int, kl_in: str, estimator: str, seed: int) -> np.ndarray:
    """The policy [P, A] that PPO ends with on the default pool."""
    env = gym.make_vec("AnswerPool-v0", num_envs=answers)
    agent = agents.make(
        "ppo", env, seed=seed, policy="table", beta=beta, kl_in=kl_in, kl_estimator=estimator,
        # One update a rollout, so that every gradient is on-policy, on rewards as they are.
        n_steps=1, batch_size=answers, n_epochs=1, clip_range=None, normalize_advantage=False,
        gamma=1.0, gae_lambda=1.0, max_grad_norm=None,
        # Steps that shrink to nothing: the policy comes to rest instead of trembling round the point.
        learning_rate="lin_0.1",
    )  # fmt: skip
    agent.learn(rounds * answers)
    pool = AnswerPool.default()
    policy = agents.action_probabilities(agent, np.arange(pool.n_prompts), pool.n_answers)
    env.close()
    return policy


def measure_fixed_point(
    arm: str, beta: float, rounds: int, answers: int, seeds: Sequence[int]
) -> FixedPoint:
    """Train a run of an arm for each seed; compare their last policies with both predicted fixed points."""
    pool = AnswerPool.default()
    optimum, k3_point = pool.optimal_policy(beta), kl_theory.k3_fixed_point(pool, beta)
    predictions = {
        "k1 in the loss": ("the best answer alone", pool.optimal_policy(0.0)),
        "k3 in the loss": ("beta ref / (lam - r)", k3_point),
    }
    label, predicted = predictions.get(arm, ("ref exp(r / beta) / Z", optimum))
    policies = [train(beta, rounds, answers, *ARMS[arm], seed) for seed in seeds]

    def measures(policy: np.ndarray) -> tuple[float, float, float, float]:
        best = policy[np.arange(pool.n_prompts), pool.proxy.argmax(axis=1)].mean()
        expected = pool.expected(policy, "proxy")
        return pool.kl(policy, optimum), pool.kl(policy, k3_point), float(best), expected

    kl_opt, kl_k3, p_best, proxy = (
        estimate(list(values), np.median) for values in zip(*map(measures, policies), strict=True)
    )
    return FixedPoint(
        arm, len(policies), label, kl_opt, kl_k3, p_best, proxy, *measures(predicted),
        np.stack([policy[0] for policy in policies]),
    )  # fmt: skip
