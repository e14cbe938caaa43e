"""Algorithms and settings that are trained, and where the expected gradient of each comes to rest.

The reward is 0 or 1 less beta KL(pi || ref); the optimum is ref * exp(r / beta), normalised. In all of these
the policy comes to rest at a multiple of the reference for the right answers and another for the wrong ones,
so one number a prompt, its pass rate p, says everything. With q the reference's pass rate:

    KL in the reward   f = r - beta log(pi / ref) is the same for every answer: the optimum, whatever the
                       baseline, and also where f is divided by a deviation. (That deviation is then 0 at the
                       optimum, and what is divided by it does not become small on the way there.)
    KL in the loss     w(p) = beta D(p), with w the weight of the reward's gradient in `lab_theory`: 1 - 1/G
                       without a deviation, w_G(p) with the group's; and D, per unit of logit(p), the expected
                       gradient of the KL estimator:

    k2; k1 or k3       D = logit(p) - logit(q), that of KL(pi || ref): the optimum for beta / w in place of
      with the ratio   beta. (On-policy k3 with the ratio has k2's gradient, sample by sample.)
    k3                 D = (p - q) / (p (1 - p)), that of KL(ref || pi)
    k1                 D = 0: nothing holds the policy, p goes to 1
    k2 with dynamic    D = (1 - p^(G-1)) log(p / q) - (1 - (1-p)^(G-1)) log((1-p) / (1-q)): a group that is
      sampling         kept holds fewer of the answers that are common. The reward's gradient does not notice,
                       for the groups that are dropped have none

So a deviation, or just the own reward in the mean (w = 1 - 1/G), moves the optimum as soon as the KL is not
divided or multiplied with the reward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from common.lab_theory import prompt_weight, total_deviation
from llmgym import AnswerPool

ANSWERS = 512  # sampled in an update, by every arm
DEGENERATE = 0.02  # a batch's deviation at which one of its answers or none is wrong
KEPT_ROWS = 64  # of the environment in dynamic sampling: answers of rows that no group needs are wasted


@dataclass(frozen=True)
class Arm:
    """One row of the table: an agent and its settings; estimator is its gradient in `common.lab_theory`."""

    name: str
    agent: str
    estimator: str | None = None
    group_size: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def kl_in(self) -> str:
        """"reward" or "loss"."""
        return str(self.config.get("kl_in", "reward"))

    @property
    def rests_at(self) -> str:
        """What decides the resting point: "optimum" or the slope of a KL estimator, see `resting_point`."""
        if self.kl_in == "reward":
            return "optimum"
        if self.config.get("dynamic_sampling"):
            return "k2, dynamic"
        estimator = str(self.config["kl_estimator"])
        return "k2" if self.config.get("use_bias_correction_kl") else estimator

    @property
    def n_envs(self) -> int:
        """Rows of the vector environment: the answers of an update are one step of it."""
        if self.config.get("dynamic_sampling"):
            return KEPT_ROWS
        return ANSWERS // 2 if self.agent == "remax" else ANSWERS

    @property
    def settings(self) -> dict[str, Any]:
        """Configuration of the agent, without step size and beta."""
        if self.agent == "reinforce":
            return {"gamma": 1.0, **self.config}
        if self.agent == "ppo":
            return {"n_steps": 1, "batch_size": ANSWERS, **self.config}
        if self.agent == "remax":
            return {"n_groups": ANSWERS // 2, "num_generations": 1, **self.config}
        assert self.group_size is not None
        sizes = {"num_generations": self.group_size, "n_groups": ANSWERS // self.group_size}
        return sizes | self.config


def _kl_in_reward(scale: str) -> Arm:
    name = "GRPO, no std" if scale == "none" else f"GRPO, {scale} std"
    return Arm(name, "grpo", name, 8, {"scale_rewards": scale, "kl_in": "reward"})


def _kl_in_loss(name: str, estimator: str, scale: str, group_size: int = 8, **more: Any) -> Arm:
    config = {"scale_rewards": scale, "kl_in": "loss", "kl_estimator": estimator}
    return Arm(name, "grpo", None, group_size, config | more)


ARMS = (
    Arm("REINFORCE", "reinforce", "REINFORCE", None, {"baseline": "none"}),
    Arm("REINFORCE, batch mean", "reinforce", "REINFORCE, batch mean", None, {"baseline": "batch_mean"}),
    Arm("PPO, 4 epochs", "ppo", "PPO, whitened", None, {"n_epochs": 4}),
    Arm("ReMax", "remax", "ReMax"),
    Arm("RLOO, G = 2", "rloo", "RLOO", 2),
    Arm("RLOO", "rloo", "RLOO", 8),
    Arm("RLOO, G = 64", "rloo", "RLOO", 64),
    _kl_in_reward("none"),
    _kl_in_reward("batch"),
    _kl_in_reward("group"),
    _kl_in_loss("k2, no std", "k2", "none"),
    _kl_in_loss("k2, no std, G = 2", "k2", "none", 2),
    _kl_in_loss("k2, no std, dynamic sampling", "k2", "none", dynamic_sampling=True),
    _kl_in_loss("k1 with ratio, no std", "k1", "none", use_bias_correction_kl=True),
    _kl_in_loss("k3, no std", "k3", "none"),
    _kl_in_loss("k1, no std", "k1", "none"),
    _kl_in_loss("k2, batch std", "k2", "batch"),
    _kl_in_loss("k2, group std", "k2", "group"),
    _kl_in_loss("k3, group std", "k3", "group"),
)


def resting_point(arm: Arm, pool: AnswerPool, beta: float) -> np.ndarray:
    """The policy [P, A] that the expected gradient leads to from the reference; rewards are 0 and 1.

    Where nothing stops it that is pass rate 1. (With k1 it is then one of many: noise moves the shares of the
    right answers, and the KL does not restore them.)
    """
    if arm.rests_at == "optimum":
        return pool.optimal_policy(beta)
    right = pool.proxy == 1.0
    q = (pool.ref_probs * right).sum(axis=1)
    size = arm.group_size
    assert size is not None
    scale = arm.config["scale_rewards"]
    if arm.rests_at == "k1":
        return _policy(pool, np.ones_like(q), q)
    if scale == "group":
        return _policy(pool, _solve(partial(prompt_weight, group_size=size), arm.rests_at, q, beta, size), q)
    p, deviation = q, 1.0
    for _ in range(200 if scale == "batch" else 1):  # the batch's deviation depends on all pass rates
        if scale == "batch":
            deviation = total_deviation(pool, _policy(pool, p, q))
            if deviation < DEGENERATE:
                return _policy(pool, np.ones_like(q), q)
        weight = (1 - 1 / size) / deviation
        p = _solve(partial(np.full_like, fill_value=weight), arm.rests_at, q, beta, size)
    return _policy(pool, p, q)


def _policy(pool: AnswerPool, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The reference with pass rates p [P] in place of q [P]."""
    right = pool.proxy == 1.0
    return pool.ref_probs * np.where(right, (p / q)[:, None], ((1 - p) / (1 - q))[:, None])


def _solve(
    weight: Callable[[np.ndarray], np.ndarray], estimator: str, q: np.ndarray, beta: float, group_size: int
) -> np.ndarray:
    """The first pass rate above q at which ``weight(p) = beta D(p)``, [P].

    Above q the weight pulls up and the KL pulls down: on a fine grid of log-odds the first change of sign is
    found, and then halved.
    """
    offsets = np.linspace(0.0, 40.0, 801)
    start = np.log(q / (1 - q))

    def excess(logit: np.ndarray, base: np.ndarray) -> np.ndarray:
        return weight(_sigmoid(logit)) - beta * _slope(estimator, logit, base, group_size)

    above = excess(start[:, None] + offsets, start[:, None]) > 0
    first = np.where(above.all(axis=1), len(offsets) - 1, (~above).argmax(axis=1))
    low, high = start + offsets[np.maximum(first - 1, 0)], start + offsets[first]
    for _ in range(60):
        middle = (low + high) / 2
        up = excess(middle, start) > 0
        low, high = np.where(up, middle, low), np.where(up, high, middle)
    return _sigmoid((low + high) / 2)


def _slope(estimator: str, logit: np.ndarray, start: np.ndarray, group_size: int) -> np.ndarray:
    """D of the module's docstring, from the log-odds of p and q."""
    p, q = _sigmoid(logit), _sigmoid(start)
    if estimator == "k2":
        return logit - start
    if estimator == "k3":
        return (p - q) / (p * _sigmoid(-logit))
    kept_right = 1 - p ** (group_size - 1)
    kept_wrong = 1 - _sigmoid(-logit) ** (group_size - 1)
    log_right = np.log(p / q)
    return kept_right * log_right - kept_wrong * (log_right - (logit - start))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
