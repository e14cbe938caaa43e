"""Action distributions against torch.distributions and exact frequencies."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from agents.policies import heads


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_masked_logits_H12():
    logits = heads.mask_logits(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1, 1, 0]])).requires_grad_()
    np.testing.assert_allclose(torch.softmax(logits, -1).detach(), [[0.2689414, 0.7310586, 0.0]], atol=1e-6)
    log_prob, entropy = heads.categorical_log_prob_and_entropy(logits, torch.tensor([2]))
    assert log_prob.item() == -math.inf
    assert entropy.item() == pytest.approx(0.5822031, abs=1e-6)
    entropy.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    draws = heads.categorical_sample(logits.detach().expand(5000, -1), generator())
    assert set(draws.tolist()) == {0, 1}


def test_a_row_without_an_allowed_action_is_an_error_H13():
    mask = torch.tensor([[1, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"no action is allowed in row\(s\) \[1\]"):
        heads.mask_logits(torch.zeros(2, 3), mask)


def test_sampling_frequencies_are_the_probabilities():
    logits = torch.tensor([0.0, -1.0, 2.0, 0.5, -3.0, 1.0])
    draws = heads.categorical_sample(logits.expand(60_000, -1), generator(1))
    expected = 60_000 * torch.softmax(logits.double(), -1).numpy()
    assert stats.chisquare(np.bincount(draws, minlength=6), expected).pvalue > 0.01


def test_rows_are_sampled_from_their_own_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]]).repeat(30_000, 1)
    draws = heads.categorical_sample(logits, generator(2)).reshape(-1, 2).numpy()
    for row in range(2):
        expected = 30_000 * torch.softmax(logits[row].double(), -1).numpy()
        assert stats.chisquare(np.bincount(draws[:, row], minlength=3), expected).pvalue > 0.01
    # One draw says nothing about its neighbour.
    table = np.zeros((3, 3))
    np.add.at(table, (draws[:, 0], draws[:, 1]), 1)
    assert stats.chi2_contingency(table).pvalue > 0.01


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24], ids=["first", "last"])
def test_actions_without_probability_are_never_drawn(monkeypatch, uniform):
    """At both ends of the uniform draw, for many distributions with impossible actions at the ends."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 4, (2000, 50)), dtype=torch.float32)
    logits[:, [0, 1, 7, 48, 49]] = -torch.inf
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, uniform))
    draws = heads.categorical_sample(logits, generator())
    assert (torch.softmax(logits, -1)[torch.arange(2000), draws] > 0).all()


def test_categorical_agrees_with_torch():
    logits = torch.randn(7, 5, generator=generator(3), dtype=torch.float64)
    actions = torch.tensor([0, 4, 2, 1, 3, 3, 0])
    log_prob, entropy = heads.categorical_log_prob_and_entropy(logits, actions)
    reference = torch.distributions.Categorical(logits=logits)
    np.testing.assert_allclose(log_prob, reference.log_prob(actions), atol=1e-12)
    np.testing.assert_allclose(entropy, reference.entropy(), atol=1e-12)


def test_gaussian_agrees_with_torch():
    mean, actions = torch.randn(2, 6, 3, generator=generator(4), dtype=torch.float64)
    log_std = torch.tensor([-1.0, 0.0, 0.7], dtype=torch.float64)
    reference = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    np.testing.assert_allclose(
        heads.gaussian_log_prob(mean, log_std, actions), reference.log_prob(actions), atol=1e-12
    )
    np.testing.assert_allclose(heads.gaussian_entropy(mean, log_std), reference.entropy(), atol=1e-12)


def test_gaussian_samples_have_their_mean_and_deviation():
    mean, log_std = torch.tensor([[1.0, -2.0]]), torch.tensor([0.5, -1.0])
    draws = heads.gaussian_sample(mean.expand(40_000, -1), log_std, generator(5)).numpy()
    for d in range(2):
        cdf = stats.norm(mean[0, d].item(), log_std[d].exp().item()).cdf
        assert stats.kstest(draws[:, d], cdf).pvalue > 0.01
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.02
