"""Squared bias and variance of GAE's lambda-return when the critic is wrong: exact and simulated.

Trajectories of T steps that terminate, without discount: every reward is 1 plus noise of deviation s_r,
so the true value of the state at step t is T - t. The critic is wrong by an error of deviation s_e that
belongs to the state: it is drawn once for each replication and state, and stays the same however many
trajectories are averaged. The lambda-return of the first state is G = A_0 + V(s_0), with A from
`agents.advantages.gae`, l short for lambda, e_t for the errors and n_t for the noise:

    G - V_true(s_0) = (1 - l) * sum_{t=1}^{T-1} l^(t-1) * e_t   +   sum_{t=0}^{T-1} l^t * n_t

(the critic's error in the first state itself cancels). The first sum is the bias of a replication, the
second its noise, so on average over replications

    squared bias   s_e^2 * (1 - l) / (1 + l) * (1 - l^(2 (T - 1)))
    variance       s_r^2 * (1 - l^(2 T)) / (1 - l^2),        T * s_r^2 at l = 1.

The best lambda makes their sum smallest; for T without end it solves (1 - l)^2 / l = (s_r / s_e)^2.

The two are measured apart on pairs of trajectories that share the critic and have opposite noise
(antithetic variates): the mean of a pair's errors is the bias, half their difference the noise.
"""

from __future__ import annotations

import numpy as np
import torch

from agents.advantages import gae

REWARD = 1.0  # expected reward of a step
PAIRS_AT_ONCE = 5_000  # bounds the memory: 100 steps of so many pairs are 8 MB an array


def analytic_squared_bias(gae_lambda: np.ndarray | float, value_error: float, steps: int) -> np.ndarray:
    """``s_e^2 (1 - l) / (1 + l) (1 - l^(2 (T - 1)))``, shape of `gae_lambda`."""
    lam = np.asarray(gae_lambda, dtype=float)
    return value_error**2 * (1 - lam) / (1 + lam) * (1 - lam ** (2 * (steps - 1)))


def analytic_variance(gae_lambda: np.ndarray | float, reward_noise: float, steps: int) -> np.ndarray:
    """``s_r^2 (1 - l^(2 T)) / (1 - l^2)``, which tends to ``T s_r^2`` at 1; shape of `gae_lambda`."""
    lam = np.asarray(gae_lambda, dtype=float)
    below = np.where(lam < 1, lam, 0.0)
    return reward_noise**2 * np.where(lam < 1, (1 - below ** (2 * steps)) / (1 - below**2), steps)


def best_lambda_endless(value_error: float, reward_noise: float) -> float:
    """The lambda in (0, 1) with ``(1 - l)^2 / l = (s_r / s_e)^2``: the best for T without end."""
    q = (reward_noise / value_error) ** 2
    # 1 + q/2 - sqrt(q + q^2/4) without the cancellation at large q: the roots' product is 1.
    return float(1 / (1 + q / 2 + np.sqrt(q + q**2 / 4)))


def search_grid(points: int) -> np.ndarray:
    """Values of lambda from 0 to 1, closer together towards 1: ``[points + 1]``."""
    return np.append(1 - np.geomspace(1, 1e-3, points), 1.0)


def best_lambda(value_error: float, reward_noise: float, steps: int) -> float:
    """The lambda with the smallest sum of squared bias and variance, from the formulas, on a fine grid."""
    grid = search_grid(20_001)
    total = analytic_squared_bias(grid, value_error, steps) + analytic_variance(grid, reward_noise, steps)
    return float(grid[total.argmin()])


def lambda_returns(rewards: torch.Tensor, values: torch.Tensor, gae_lambda: float) -> torch.Tensor:
    """The lambda-return of the first state of trajectories that terminate: ``[T, N]`` twice to ``[N]``."""
    next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
    terminated = torch.zeros(values.shape, dtype=torch.bool)
    terminated[-1] = True
    advantages = gae(rewards, values, next_values, terminated, torch.zeros_like(terminated), 1.0, gae_lambda)
    return advantages[0] + values[0]


def simulate(
    lambdas: np.ndarray, pairs: int, steps: int, reward_noise: float, value_error: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Bias and noise of the lambda-return in each pair of trajectories, two ``[lambdas, pairs]``.

    A pair shares the errors of the critic and has opposite reward noise. All lambdas see the same
    trajectories.
    """
    bias, noise = np.empty((2, len(lambdas), pairs))
    truth = torch.arange(steps, 0, -1, dtype=torch.float64)[:, None] * REWARD
    for start in range(0, pairs, PAIRS_AT_ONCE):
        part = slice(start, min(start + PAIRS_AT_ONCE, pairs))
        shape = (steps, part.stop - start)
        epsilon = torch.from_numpy(rng.normal(0, reward_noise, shape))
        values = truth + torch.from_numpy(rng.normal(0, value_error, shape))
        rewards = REWARD + torch.cat([epsilon, -epsilon], 1)
        values = torch.cat([values, values], 1)
        for index, gae_lambda in enumerate(lambdas):
            error = lambda_returns(rewards, values, float(gae_lambda)) - truth[0]
            one, other = error.numpy().reshape(2, -1)
            bias[index, part] = (one + other) / 2
            noise[index, part] = (one - other) / 2
    return bias, noise
