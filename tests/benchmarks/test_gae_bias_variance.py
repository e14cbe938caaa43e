"""Bias and variance of the lambda-return: exact, then measured within four standard errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

import gae_bias_variance as script
from common import lambda_return
from common.compare import compare
from common.lambda_return import (
    analytic_squared_bias,
    analytic_variance,
    best_lambda,
    best_lambda_endless,
    lambda_returns,
    search_grid,
    simulate,
)

LAMBDAS = [0.0, 0.3, 0.9, 0.99, 1.0]


@pytest.mark.parametrize("gae_lambda", LAMBDAS)
def test_the_lambda_return_is_the_mixture_of_n_step_returns(gae_lambda):
    rng = np.random.default_rng(0)
    steps = 6
    rewards, values = rng.normal(size=(2, steps, 3))
    # G^(n) = r_0 + ... + r_{n-1} + V(s_n), for n = T without a value.
    n_step = [rewards[:n].sum(axis=0) + (values[n] if n < steps else 0.0) for n in range(1, steps + 1)]
    weights = [(1 - gae_lambda) * gae_lambda ** (n - 1) for n in range(1, steps)]
    weights.append(gae_lambda ** (steps - 1))
    expected = np.einsum("n,nc->c", weights, n_step)
    found = lambda_returns(torch.from_numpy(rewards), torch.from_numpy(values), gae_lambda)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("gae_lambda", LAMBDAS)
@pytest.mark.parametrize("steps", [2, 7, 100])
def test_formulas_are_sums_of_squared_impulse_responses(gae_lambda, steps):
    """The return is linear, so independent errors add up by the squares of what each contributes."""
    impulses, zeros = torch.eye(steps, dtype=torch.float64), torch.zeros(steps, steps, dtype=torch.float64)
    of_rewards = lambda_returns(impulses, zeros, gae_lambda)
    of_values = lambda_returns(zeros, impulses, gae_lambda)
    assert of_values[0] == 0.0  # the error in the first state itself cancels
    assert analytic_variance(gae_lambda, 0.3, steps) == pytest.approx(0.09 * float(of_rewards.square().sum()))
    assert analytic_squared_bias(gae_lambda, 3.0, steps) == pytest.approx(9 * float(of_values.square().sum()))


def test_formulas_by_hand():
    # Two steps: G = r_0 + (1 - l) V_1 + l r_1.
    assert analytic_squared_bias(0.4, 3.0, 2) == pytest.approx(9 * 0.6**2)
    assert analytic_variance(0.4, 0.3, 2) == pytest.approx(0.09 * (1 + 0.16))
    assert analytic_variance(1.0, 0.3, 100) == pytest.approx(9.0)
    assert analytic_squared_bias(1.0, 3.0, 100) == 0.0
    np.testing.assert_allclose(analytic_variance(np.array([0.0, 1.0]), 2.0, 5), [4.0, 20.0])


@pytest.mark.parametrize("value_error", [0.01, 0.1, 0.3, 1.0, 3.0, 30.0])
def test_best_lambda_without_end(value_error):
    best = best_lambda_endless(value_error, 0.3)
    assert 0 < best < 1 and (1 - best) ** 2 / best == pytest.approx((0.3 / value_error) ** 2)
    # A long horizon comes to the same, up to the grid's spacing of 0.04% in 1 - lambda.
    assert best_lambda(value_error, 0.3, 100_000) == pytest.approx(best, abs=1e-3 * (1 - best))


def test_best_lambda_of_a_short_trajectory():
    # Two steps: s_e^2 (1 - l)^2 + s_r^2 (1 + l^2) is smallest at s_e^2 / (s_e^2 + s_r^2).
    assert best_lambda(3.0, 1.5, 2) == pytest.approx(0.8, abs=1e-4)
    assert best_lambda(3.0, 0.3, 100) == pytest.approx(0.9049, abs=1e-4)
    grid = search_grid(31)
    assert grid[0] == 0 and grid[-1] == 1 and (np.diff(grid) > 0).all()


def test_measured_values_within_four_standard_errors():
    args = script.Args(pairs=3_000, seed=1)
    points = script.measure(args)
    assert [p.gae_lambda for p in points] == list(args.lambdas)
    for point in points:
        assert point.squared_bias.agrees and point.variance.agrees
        assert point.variance.analytic == float(analytic_variance(point.gae_lambda, 0.3, 100))
    assert points[-1].squared_bias.measured == pytest.approx(0.0, abs=1e-20)
    # Sharp enough to see an error of a sixth in either.
    for compared in (c for p in points[:-1] for c in (p.squared_bias, p.variance)):
        assert compared.standard_error < compared.analytic / 6 / 4


def test_opposite_noise_measures_what_independent_noise_does():
    """Squared bias and variance from trajectories with independent noise, six for each critic."""
    rng = np.random.default_rng(2)
    critics, each, steps, gae_lambda = 1_500, 6, 40, 0.9
    values = np.arange(steps, 0, -1)[:, None] + rng.normal(0, 3.0, (steps, critics))
    rewards = 1 + rng.normal(0, 0.3, (steps, critics, each))
    returns = lambda_returns(
        torch.from_numpy(rewards.reshape(steps, -1)),
        torch.from_numpy(np.repeat(values, each, axis=1)),
        gae_lambda,
    )
    error = returns.numpy().reshape(critics, each) - steps
    variances = error.var(axis=1, ddof=1)
    squared_bias = error.mean(axis=1) ** 2 - variances / each  # less what the noise adds
    assert compare(float(analytic_squared_bias(gae_lambda, 3.0, steps)), squared_bias).agrees
    assert compare(float(analytic_variance(gae_lambda, 0.3, steps)), variances).agrees


def test_pairs_in_parts_fill_every_column(monkeypatch):
    monkeypatch.setattr(lambda_return, "PAIRS_AT_ONCE", 7)
    bias, noise = simulate(np.array([0.5, 1.0]), 20, 10, 0.3, 3.0, np.random.default_rng(0))
    assert bias.shape == noise.shape == (2, 20)
    assert len(np.unique(bias[0])) == len(np.unique(noise[0])) == 20
    np.testing.assert_allclose(bias[1], 0, atol=1e-12)


@pytest.mark.parametrize("value_error", [0.1, 3.0, 30.0])
def test_the_best_lambda_found_is_nearly_the_best(value_error):
    args = script.Args(search_pairs=1_000)
    found = script.find_best(args, value_error, np.random.default_rng(0))

    def squared_error(lam):
        return analytic_squared_bias(lam, value_error, 100) + analytic_variance(lam, 0.3, 100)

    assert found.low <= found.measured <= found.high
    assert found.analytic == best_lambda(value_error, 0.3, 100)
    assert found.squared_error_analytic == pytest.approx(float(squared_error(found.analytic)))
    assert squared_error(found.measured) <= 1.01 * squared_error(found.analytic)


@pytest.mark.parametrize(
    "change, message",
    [({"steps": 1}, "--steps is 1"), ({"search_pairs": 1}, "--search-pairs is 1"),
     ({"reward_noise": 0.0}, "--reward-noise is 0.0"), ({"lambdas": (0.5, 1.1)}, "--lambdas"),
     ({"lambdas": ()}, "--lambdas"), ({"value_errors": (0.0,)}, "--value-errors")],
)  # fmt: skip
def test_bad_options_are_named(change, message, capsys):
    assert script.main(script.Args(**change)) == 2
    assert message in capsys.readouterr().out


def test_the_script_end_to_end(tmp_path: Path, capsys):
    options = ["--quick", "--pairs", "500", "--search-pairs", "100", "--steps", "20",
               "--value-errors", "0.3", "3"]  # fmt: skip
    assert script.main(tyro.cli(script.Args, args=[*options, "--out", str(tmp_path)])) == 0
    assert "standard errors: yes" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [b["value_error"] for b in summary["best_lambda"]] == [0.3, 3.0]
    for point in summary["points"]:
        for name in ("squared_bias", "variance"):
            assert set(point[name]) == {"analytic", "measured", "standard_error", "z"}
    assert (tmp_path / "gae_bias_variance.png").stat().st_size > 10_000
