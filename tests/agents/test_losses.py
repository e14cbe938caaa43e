"""Losses by hand, and their gradients by finite differences."""

import numpy as np
import pytest
import torch

from agents.losses import clip_fraction, clipped_loss, masked_mean, policy_gradient_loss, value_loss

DOUBLE = torch.float64


def tensor(x):
    return torch.tensor(x, dtype=DOUBLE)


def finite_difference(function, x: torch.Tensor, step: float = 1e-6) -> np.ndarray:
    """d function(x).sum() / dx by central differences."""
    slope = np.zeros(len(x))
    for i in range(len(x)):
        up, down = x.clone(), x.clone()
        up[i] += step
        down[i] -= step
        slope[i] = (function(up).sum() - function(down).sum()).item() / (2 * step)
    return slope


def autograd(function, x: torch.Tensor) -> np.ndarray:
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad.numpy()


def loss_of_ratio(advantages, low, high=None):
    """clipped_loss as a function of the ratio."""
    adv = tensor(advantages)
    return lambda ratio: clipped_loss(torch.log(ratio), torch.zeros_like(ratio), adv, low, high).loss


def test_clipped_loss_in_its_four_quadrants_C03():
    function, ratio = loss_of_ratio([2, 2, -2, -2], 0.2), tensor([1.5, 0.5, 1.5, 0.5])
    np.testing.assert_allclose(function(ratio), [-2.4, -1.0, 3.0, 1.6], atol=1e-12)
    assert function(ratio).mean().item() == pytest.approx(0.3)
    np.testing.assert_allclose(autograd(function, ratio), [0, -2, 2, 0], atol=1e-12)
    np.testing.assert_allclose(finite_difference(function, ratio), [0, -2, 2, 0], atol=1e-8)


def test_asymmetric_clipping_C05():
    function, ratio = loss_of_ratio([1, -1], 0.2, 0.28), tensor([1.5, 0.5])
    np.testing.assert_allclose(function(ratio), [-1.28, 0.8], atol=1e-12)
    # Between the two bounds the one above still lets the gradient through.
    np.testing.assert_allclose(autograd(function, tensor([1.25, 1.25])), [-1, 1])


@pytest.mark.parametrize("clip", [(0.2, None), (0.1, 0.3), (None, None), (0.0, None)])
def test_gradient_of_the_clipped_loss_is_its_slope(clip):
    rng = np.random.default_rng(0)
    logp, old, adv = (tensor(rng.normal(size=60)) * s for s in (0.3, 0.3, 1.0))
    function = lambda x: clipped_loss(x, old, adv, *clip).loss  # noqa: E731
    np.testing.assert_allclose(autograd(function, logp), finite_difference(function, logp), atol=1e-7)


def test_unclipped_loss_is_the_importance_weighted_policy_gradient():
    rng = np.random.default_rng(1)
    logp, old, adv = (tensor(rng.normal(size=9)) for _ in range(3))
    loss, ratio = clipped_loss(logp, old, adv, None)
    np.testing.assert_allclose(ratio, torch.exp(logp - old), rtol=1e-12)
    np.testing.assert_allclose(loss, -torch.exp(logp - old) * adv, rtol=1e-12)


def test_at_ratio_one_every_loss_has_the_policy_gradient():
    rng = np.random.default_rng(2)
    logp, adv = tensor(rng.normal(size=9)), tensor(rng.normal(size=9))
    expected = autograd(lambda x: policy_gradient_loss(x, adv), logp)
    np.testing.assert_allclose(expected, -adv)
    for clip in (0.2, None):
        slope = autograd(lambda x, c=clip: clipped_loss(x, logp, adv, c).loss, logp)
        np.testing.assert_allclose(slope, expected)


def test_clip_fraction_counts_both_sides_whatever_the_advantage_C04():
    assert clip_fraction(tensor([1.5, 0.5, 1.1, 0.9]), 0.2).mean().item() == 0.5
    assert clip_fraction(tensor([1.25, 1.35, 0.85, 0.75]), 0.2, 0.3).tolist() == [0, 1, 0, 1]
    assert clip_fraction(tensor([1.0, 1.0]), 0.0).tolist() == [0, 0]


def test_value_clipping_round_the_old_value_C13():
    old, new, returns = tensor([1, 1]), tensor([2, 2]), tensor([0, 3])
    function = lambda v: value_loss(v, returns, old, 0.2)  # noqa: E731
    np.testing.assert_allclose(function(new), [2.0, 1.62], atol=1e-12)
    np.testing.assert_allclose(autograd(function, new), [2.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(finite_difference(function, new), [2.0, 0.0], atol=1e-8)


def test_value_clipping_uses_the_stored_values_C14():
    assert value_loss(tensor([2]), tensor([4]), tensor([1]), 0.0).tolist() == [4.5]


def test_gradient_of_the_value_loss_is_its_slope():
    rng = np.random.default_rng(3)
    values, returns, old = (tensor(rng.normal(size=60)) for _ in range(3))
    for function in (lambda v: value_loss(v, returns), lambda v: value_loss(v, returns, old, 0.4)):
        np.testing.assert_allclose(autograd(function, values), finite_difference(function, values), atol=1e-7)
    np.testing.assert_allclose(value_loss(values, returns), (values - returns) ** 2 / 2)


def test_value_clipping_without_old_values_is_an_error():
    with pytest.raises(ValueError, match="old_values"):
        value_loss(tensor([1]), tensor([1]), None, 0.2)


def test_masked_mean_counts_samples():
    x = tensor([[1, 2, 9], [3, 9, 9]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(x, mask).item() == 2.0
    assert masked_mean(x).item() == 5.5
    assert masked_mean(tensor([])).item() == 0.0


def test_masked_mean_of_nothing_is_zero_with_a_finite_gradient():
    x = tensor([1.0, float("nan"), float("inf")]).requires_grad_()
    mean = masked_mean(x, torch.zeros(3))
    mean.backward()
    assert mean.item() == 0.0 and x.grad is not None and x.grad.tolist() == [0, 0, 0]


def test_masked_mean_keeps_nan_of_masked_places_out_of_value_and_gradient():
    x = tensor([1.0, float("nan"), 3.0]).requires_grad_()
    mean = masked_mean(x, torch.tensor([1, 0, 1]))
    mean.backward()
    assert mean.item() == 2.0 and x.grad is not None and x.grad.tolist() == [0.5, 0, 0.5]


def test_token_means_add_up_over_micro_batches_C20():
    """Micro-batches of 4 tokens and 1: their means weighted by tokens, not the mean (3.5) of the means."""
    tokens = tensor([[1, 1, 1, 1], [6, 0, 0, 0]]).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    whole = masked_mean(tokens, mask)
    whole.backward()
    assert tokens.grad is not None
    one_go, tokens.grad = tokens.grad.clone(), None
    total = 0.0
    for row in range(2):
        part = masked_mean(tokens[row], mask[row]) * (mask[row].sum() / mask.sum())
        part.backward()
        total += part.item()
    assert whole.item() == pytest.approx(2.0) and total == pytest.approx(2.0)
    np.testing.assert_allclose(tokens.grad, one_go)
    # However it is cut, the five tokens give the same mean.
    assert masked_mean(tensor([1, 1, 1, 1, 6])).item() == pytest.approx(2.0)
