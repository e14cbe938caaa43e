"""Exact moments against a sum over all possible batches, then the measurement within four standard errors."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

import policy_gradient_variance as script
from common.bandit import (
    BASELINES,
    Bandit,
    analytic_mean,
    analytic_variance,
    estimate_gradients,
    make_bandit,
)

BANDIT = Bandit(np.array([0.5, 0.2, 0.3]), np.array([1.0, -2.0, 0.7]))


def test_the_exact_gradient_is_that_of_the_expected_reward():
    logits = torch.tensor(np.log(BANDIT.probabilities), requires_grad=True)
    (torch.softmax(logits, -1) @ torch.tensor(BANDIT.rewards)).backward()
    np.testing.assert_allclose(BANDIT.gradient, logits.grad, atol=1e-12)
    assert BANDIT.expected_reward == pytest.approx(0.5 - 0.4 + 0.21)


def test_one_estimate_by_hand():
    # Actions 0 and 1 with rewards 1 and -2; leave-one-out: 3 and -3.
    # (3 * (0.5, -0.2, -0.3) - 3 * (-0.5, 0.8, -0.3)) / 2 = (1.5, -1.5, 0); the batch mean gives half.
    actions = np.array([[0, 1]])
    np.testing.assert_allclose(estimate_gradients("leave-one-out", BANDIT, actions), [[1.5, -1.5, 0]])
    np.testing.assert_allclose(estimate_gradients("batch mean", BANDIT, actions), [[0.75, -0.75, 0]])
    # Greedy: action 0 with reward 1, so advantages 0 and -3.
    np.testing.assert_allclose(estimate_gradients("greedy", BANDIT, actions), [[0.75, -1.2, 0.45]])


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("shift", [0.0, 10.0])
def test_exact_moments_are_those_over_all_batches(baseline, n, shift):
    bandit = BANDIT.shifted(shift)
    batches = np.array(list(itertools.product(range(3), repeat=n)))
    weights = bandit.probabilities[batches].prod(axis=1)
    estimates = estimate_gradients(baseline, bandit, batches)
    mean = weights @ estimates
    np.testing.assert_allclose(analytic_mean(baseline, bandit, n), mean, atol=1e-12)
    variance = weights @ (estimates - mean) ** 2
    np.testing.assert_allclose(analytic_variance(baseline, bandit, n), variance, rtol=1e-10)


def test_measured_values_within_four_standard_errors():
    bandit, results = script.run(script.Args(repetitions=3_000, seed=1))
    assert [(r.baseline, r.shift) for r in results] == [(b, s) for s in (0.0, 10.0) for b in BASELINES]
    for result in results:
        assert result.variance.agrees and result.length.agrees
        assert result.variance.analytic == pytest.approx(sum(c.analytic for c in result.component_variance))
        assert [c.analytic for c in result.gradient] == pytest.approx(list(bandit.gradient))
        if result.baseline == "batch mean":
            assert result.length.analytic == pytest.approx(1 - 1 / 16)
            assert result.length_bias_z < -4 and result.bias_z > 4  # the bias shows
        else:
            assert all(c.agrees for c in result.gradient) and abs(result.length_bias_z) <= 4


def test_a_shift_matters_without_a_baseline_only():
    rng = np.random.default_rng(0)
    bandit = make_bandit(10, rng)
    moved = bandit.shifted(10.0)
    actions = rng.choice(10, size=(200, 16), p=bandit.probabilities)
    for baseline in BASELINES[1:]:
        before, after = (estimate_gradients(baseline, b, actions) for b in (bandit, moved))
        np.testing.assert_allclose(after, before, atol=1e-12)
    before, after = (analytic_variance("none", b, 16).sum() for b in (bandit, moved))
    assert after / before > 100


def test_an_unknown_baseline_is_named():
    with pytest.raises(ValueError, match="'mean' is not one of none, exact"):
        estimate_gradients("mean", BANDIT, np.zeros((1, 2), dtype=int))


@pytest.mark.parametrize(
    "change, message",
    [({"actions": 1}, "--actions is 1"), ({"samples": 1}, "--samples is 1"),
     ({"repetitions": 1}, "--repetitions is 1"), ({"shift": np.nan}, "--shift is nan")],
)  # fmt: skip
def test_bad_options_are_named(change, message, capsys):
    assert script.main(script.Args(**change)) == 2
    assert message in capsys.readouterr().out


def test_the_script_end_to_end(tmp_path: Path, capsys):
    args = tyro.cli(script.Args, args=["--quick", "--repetitions", "500", "--out", str(tmp_path)])
    assert script.main(args) == 0
    assert "The batch mean shortens the gradient" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["results"]) == 10 and len(summary["verdicts"]) == 4
    for result in summary["results"]:
        for compared in (result["length"], result["variance"], *result["gradient"]):
            assert set(compared) == {"analytic", "measured", "standard_error", "z"}
    assert [row["baseline"] for row in summary["growth"]] == list(BASELINES)
    assert (tmp_path / "policy_gradient_variance.png").stat().st_size > 10_000
