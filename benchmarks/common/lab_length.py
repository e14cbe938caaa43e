"""What `loss_type` does where answers have different lengths: exact and measured, on a task of when to stop.

After every token the policy stops with probability q = sigmoid(theta); after `MAX_LENGTH` it is stopped.
An answer of L tokens is right with probability r(L), which is largest at 4. With the score s of the whole
answer, the sum over its tokens, and the advantage r_i - mean(group), the expected gradient in theta is
(1 - 1/G) times

    "sum", "dr_grpo"    E[r s] = dE[r]/dtheta, divided by the constant: no bias
    "dapo"              E[r s] / E[L], in large batches: another step size
    "grpo"              E[(r - J) s / L] = d/dtheta E[(r - b) / L] at b = J: what is maximised is the
                        advantage per token. A wrong answer costs less the longer it is: answers grow
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq

from agents.advantages import group_advantages
from agents.losses import loss_weights, policy_gradient_loss, weighted_loss
from common.compare import Comparison, compare

MAX_LENGTH = 16
LENGTHS = np.arange(1, MAX_LENGTH + 1)
PASS_RATES = np.exp(-((LENGTHS - 4) ** 2) / 8)
TYPES = ("dr_grpo", "dapo", "grpo")
GROUP_SIZE, N_GROUPS = 8, 64


@dataclass(frozen=True)
class LengthResult:
    """Expected gradient in theta at one stopping probability, times `scale`, beside its analytic value."""

    loss_type: str
    stop: float
    gradient: Comparison


def length_probabilities(stop: float) -> np.ndarray:
    """P(L), [MAX_LENGTH]."""
    probabilities = stop * (1 - stop) ** (LENGTHS - 1)
    probabilities[-1] = (1 - stop) ** (MAX_LENGTH - 1)
    return probabilities


def mean_length(stop: float) -> float:
    return float(length_probabilities(stop) @ LENGTHS)


def scale(loss_type: str, stop: float) -> float:
    """What makes the types comparable: the length that each divides by, for "grpo" the mean one."""
    return float(MAX_LENGTH) if loss_type == "dr_grpo" else mean_length(stop)


def exact_gradient(loss_type: str, stop: float) -> float:
    """The expected gradient without the factor 1 - 1/G, times `scale`."""
    p = length_probabilities(stop)
    # The last token of the longest answer may be a stop or not: that part of its score has mean 0.
    score = 1.0 - stop * LENGTHS
    score[-1] = -stop * (MAX_LENGTH - 1)
    centred = p * (PASS_RATES - p @ PASS_RATES)
    if loss_type == "grpo":
        return float(centred @ (score / LENGTHS)) * mean_length(stop)
    return float(centred @ score)


def resting_stop(loss_type: str) -> float:
    """The stopping probability at which that gradient is zero."""
    return float(brentq(lambda q: exact_gradient(loss_type, q), 0.05, 0.6))


def expected_reward(stop: float) -> float:
    return float(length_probabilities(stop) @ PASS_RATES)


def sample_gradients(loss_type: str, stop: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Gradients of n batches by the package's loss, times `scale`, [n]."""
    theta = torch.full((n,), np.log(stop / (1 - stop)), dtype=torch.float64, requires_grad=True)
    log_stop, log_go = torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta)
    groups = torch.arange(N_GROUPS).repeat_interleave(GROUP_SIZE)
    losses = []
    for batch in range(n):
        drawn = rng.geometric(stop, size=len(groups))
        lengths = np.minimum(drawn, MAX_LENGTH)
        rewards = (rng.random(len(groups)) < PASS_RATES[lengths - 1]).astype(float)
        advantage = group_advantages(rewards, groups, std=None)[:, None]
        mask = torch.from_numpy(lengths[:, None] >= LENGTHS)
        stops = torch.from_numpy(drawn[:, None] == LENGTHS)
        log_prob = torch.where(stops, log_stop[batch], log_go[batch])
        weights = loss_weights(mask, loss_type, MAX_LENGTH)
        losses.append(weighted_loss(policy_gradient_loss(log_prob, advantage), weights))
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), theta)
    return -gradient.numpy() * scale(loss_type, stop)


def measure_lengths(n: int, seed: int, stops: tuple[float, ...]) -> list[LengthResult]:
    """Every loss type at every stopping probability, n batches each."""
    rng = np.random.default_rng(seed)
    shrink = 1 - 1 / GROUP_SIZE
    return [
        LengthResult(t, q, compare(exact_gradient(t, q), sample_gradients(t, q, n, rng) / shrink))
        for q in stops
        for t in TYPES
    ]
