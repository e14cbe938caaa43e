"""The benchmark of the KL estimators: its closed forms, its measurements, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm

import kl_estimators as script
from common import kl_measure, kl_theory
from llmgym import AnswerPool

NAMES = ("k1", "k2", "k3")


def k(name: str, logr: np.ndarray | float) -> np.ndarray | float:
    return {"k1": -logr, "k2": 0.5 * logr**2, "k3": np.exp(logr) - 1 - logr}[name]


# --------------------------------------------------------------------------- as a number


# Rounded as in Schulman's note for 0.1 and 1; those of k1 are 2 / mu.
@pytest.mark.parametrize(
    ("name", "mu", "bias", "std"),
    [
        ("k1", 0.1, 0.0, 20.0), ("k2", 0.1, 0.0025, 1.42), ("k3", 0.1, 0.0, 1.42),
        ("k1", 0.5, 0.0, 4.0), ("k2", 0.5, 0.0625, 1.5), ("k3", 0.5, 0.0, 1.4757),
        ("k1", 1.0, 0.0, 2.0), ("k2", 1.0, 0.25, 1.73), ("k3", 1.0, 0.0, 1.7),
    ],
)  # fmt: skip
def test_closed_forms_of_bias_and_deviation(name: str, mu: float, bias: float, std: float) -> None:
    assert kl_theory.relative_bias(name, mu) == pytest.approx(bias, abs=1e-12)
    assert kl_theory.relative_std(name, mu) == pytest.approx(std, abs=0.006)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, -1.5])
@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_against_integration(name: str, mu: float) -> None:
    def mean(function):
        return quad(lambda x: norm.pdf(x) * function(k(name, mu * x - mu**2 / 2)), -16, 16, limit=400)[0]

    kl, expected = mu**2 / 2, mean(lambda v: v)
    assert kl_theory.gaussian_kl(mu) == kl
    assert expected / kl - 1 == pytest.approx(kl_theory.relative_bias(name, mu), abs=1e-6)
    std = np.sqrt(mean(lambda v: (v - expected) ** 2)) / kl
    assert std == pytest.approx(kl_theory.relative_std(name, mu), rel=1e-6)
    fourth = mean(lambda v: (v - expected) ** 4)
    assert kl_theory.fourth_moment(name, mu) == pytest.approx(fourth, rel=1e-4)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0])
def test_measured_moments_are_within_four_standard_errors(mu: float) -> None:
    rows = kl_measure.measure_moments(mu, 20_000, torch.Generator().manual_seed(3))
    assert [row.estimator for row in rows] == list(NAMES)
    for row in rows:
        assert abs(row.bias_measured - row.bias_analytic) < 4 * row.bias_error
        assert abs(row.std_measured - row.std_analytic) < 4 * row.std_error
        assert row.errors_off < 4


def test_the_margin_tells_k2s_bias_from_none() -> None:
    k2 = kl_measure.measure_moments(1.0, 20_000, torch.Generator().manual_seed(3))[1]
    assert k2.bias_measured > 8 * k2.bias_error


def test_standard_errors_are_those_of_repeated_measurements() -> None:
    generator = torch.Generator().manual_seed(0)
    repeats = [kl_measure.measure_moments(0.5, 2_000, generator) for _ in range(200)]
    for rows in zip(*repeats, strict=True):
        # The deviation of 200 repeats is known to 5%: four of these.
        assert np.std([r.bias_measured for r in rows]) == pytest.approx(rows[0].bias_error, rel=0.2)
        assert np.std([r.std_measured for r in rows]) == pytest.approx(rows[0].std_error, rel=0.2)


# --------------------------------------------------------------------------- as a gradient


P, OLD, Q = (x.exp().numpy() for x in (kl_measure.POLICY, kl_measure.OLDER, kl_measure.REFERENCE))


def central_difference(function, logits: np.ndarray) -> np.ndarray:
    steps = 1e-5 * np.eye(len(logits))
    return np.array([(function(logits + h) - function(logits - h)) / 2e-5 for h in steps])


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("direction", ["KL(p || q)", "KL(q || p)"])
def test_gradients_of_the_divergences_by_finite_differences(direction: str) -> None:
    def divergence(logits: np.ndarray) -> float:
        a, b = (softmax(logits), Q) if direction == "KL(p || q)" else (Q, softmax(logits))
        return float(a @ np.log(a / b))

    found = kl_theory.divergence_gradient(direction, P, Q)
    np.testing.assert_allclose(found, central_difference(divergence, np.log(P)), atol=1e-9)


@pytest.mark.parametrize("ratio", ["none", "differentiated", "fixed"])
@pytest.mark.parametrize("samples", [P, OLD], ids=["on-policy", "moved"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_gradients_by_finite_differences(name: str, samples: np.ndarray, ratio: str) -> None:
    def loss(logits: np.ndarray) -> float:
        p = softmax(logits)
        weights = {"none": samples, "differentiated": p, "fixed": P}[ratio]
        return float(weights @ k(name, np.log(Q / p)))

    found = kl_theory.loss_gradient(name, P, Q, samples, ratio)
    np.testing.assert_allclose(found, central_difference(loss, np.log(P)), atol=1e-9)


def test_autograd_agrees_and_names_the_right_divergence() -> None:
    rows = kl_measure.measure_gradients()
    for row in rows:
        np.testing.assert_allclose(row.measured, row.analytic, atol=1e-12)
    names = {(row.estimator, row.samples, row.ratio): row.gradient_of for row in rows}
    zero, right, reverse = "nothing (zero)", "KL(p || q)", "KL(q || p)"
    expected = {("k1", "none"): zero, ("k2", "none"): right, ("k3", "none"): reverse}
    assert {key: names[key[0], "on-policy", key[1]] for key in expected} == expected
    assert {names[name, "moved", "none"] for name in NAMES} == {"neither"}
    for samples in ("on-policy", "moved"):
        assert [names[name, samples, "differentiated"] for name in NAMES] == [right, "neither", right]
    assert [names[name, "moved", "fixed"] for name in NAMES] == [zero, right, reverse]
    assert all((row.error < 1e-12) == (row.gradient_of == right) for row in rows)


# --------------------------------------------------------------------------- as a loss


def test_fixed_point_by_hand() -> None:
    # r = (1, 0), ref = (1, 1) / 2, beta = 1: lam^2 - 2 lam + 1/2 = 0, lam = 1 + sqrt(1/2).
    pool = AnswerPool(np.array([[1.0, 0.0]]), np.zeros((1, 2)), np.full((1, 2), 0.5))
    np.testing.assert_allclose(kl_theory.k3_fixed_point(pool, 1.0), [[0.5**0.5, 1 - 0.5**0.5]], atol=1e-12)


@pytest.mark.parametrize("beta", [1e-4, 0.3, 1.0, 50.0])
def test_gradient_vanishes_at_the_fixed_point_for_every_prompt(beta: float) -> None:
    pool = AnswerPool.random(4, 30, seed=2)
    policy = kl_theory.k3_fixed_point(pool, beta)
    np.testing.assert_allclose(policy.sum(axis=1), 1.0, atol=1e-12)
    for p, q, reward in zip(policy, pool.ref_probs, pool.proxy, strict=True):
        of_reward = p * (reward - p @ reward)
        of_k3 = kl_theory.loss_gradient("k3", p, q, samples_from=p)
        np.testing.assert_allclose(of_reward - beta * of_k3, 0.0, atol=1e-9 * max(beta, 1.0))


def test_fixed_point_is_the_maximum_that_an_optimiser_finds() -> None:
    pool, beta = AnswerPool.random(1, 6, seed=5), 0.7
    reward, q = pool.proxy[0], pool.ref_probs[0]

    def cost(logits: np.ndarray) -> float:
        p = softmax(logits)
        return -(p @ reward) + beta * float(q @ np.log(q / p))

    found = softmax(minimize(cost, np.log(q), tol=1e-12).x)
    np.testing.assert_allclose(kl_theory.k3_fixed_point(pool, beta)[0], found, atol=1e-5)


def test_fixed_point_of_equal_rewards_is_the_reference() -> None:
    ref = np.array([[0.1, 0.2, 0.7]])
    pool = AnswerPool(np.full((1, 3), 4.0), np.zeros((1, 3)), ref)
    np.testing.assert_allclose(kl_theory.k3_fixed_point(pool, 0.5), ref, atol=1e-8)
    one = AnswerPool(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)))
    np.testing.assert_allclose(kl_theory.k3_fixed_point(one, 0.5), [[1.0]])


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_fixed_point_needs_a_positive_beta(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        kl_theory.k3_fixed_point(AnswerPool.default(), beta)


def test_ppo_ends_at_the_fixed_point_of_its_estimator() -> None:
    points = {
        arm: kl_measure.measure_fixed_point(arm, beta=1.0, rounds=200, answers=256, seeds=[0, 1])
        for arm in kl_measure.ARMS
    }
    for arm in ("k1 in the reward", "k2 in the loss"):
        assert points[arm].kl_opt.value < 0.02 and points[arm].kl_k3.value > 0.7
        assert points[arm].kl_opt_predicted == pytest.approx(0.0, abs=1e-12)
    k3, k1 = points["k3 in the loss"], points["k1 in the loss"]
    assert k3.kl_k3.value < 0.02 and k3.kl_opt.value > 1.2
    assert k3.kl_opt_predicted == pytest.approx(1.2811, abs=1e-4) and k3.kl_k3_predicted < 1e-12
    assert k1.p_best.value > 0.95 and k1.p_best_predicted == 1.0
    assert k3.policies.shape == (2, 200)


# --------------------------------------------------------------------------- the script


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mu", "0"], "--mu"),
        (["--mu", "3"], "--mu"),
        (["--samples", "1"], "--samples"),
        (["--runs", "0"], "--runs"),
        (["--beta", "0"], "--beta"),
    ],
)
def test_bad_options_are_one_line(options: list[str], said: str, tmp_path: Path) -> None:
    arguments = script.tyro.cli(script.Args, args=[*options, "--out", str(tmp_path)])
    with pytest.raises(ValueError, match=said):
        script.check(arguments)
    assert script.main(arguments) == 2


def test_a_short_run_writes_both_values_side_by_side(tmp_path: Path) -> None:
    options = ["--samples", "2000", "--mu", "0.5", "--runs", "1", "--rounds", "3", "--answers", "16"]
    command = [sys.executable, script.__file__, *options, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "within 4 standard errors of the analytic value: 3 of 3 rows" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["estimator"], row["bias_analytic"]) for row in summary["moments"]] == [
        ("k1", 0.0), ("k2", 0.0625), ("k3", 0.0)
    ]  # fmt: skip
    assert len(summary["gradients"]) == 15 and len(summary["fixed_points"]) == 4
    assert {"kl_opt", "kl_opt_predicted"} <= set(summary["fixed_points"][0])
    assert (tmp_path / "kl_estimators.png").stat().st_size > 30_000
