"""The KL estimators against exact sums over a categorical distribution."""

import numpy as np
import pytest
import torch

from agents.kl import ESTIMATORS, bias_corrected, k1, k2, k3

LOGITS = torch.tensor([0.3, -1.2, 0.8, 2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([1.0, 0.2, -0.7, 0.5, 0.1], dtype=torch.float64), 0)


def exact_kl(logp, logq):
    return (logp.exp() * (logp - logq)).sum()


# log q - log p of two actions, with q/p = 2 and 1/2. k1 cancels: an early stop on it misses the move.
@pytest.mark.parametrize(
    ("estimator", "per_sample", "mean"),
    [(k1, [-0.6931472, 0.6931472], 0.0), (k2, [0.2402265, 0.2402265], 0.2402265),
     (k3, [0.3068528, 0.1931472], 0.25)],
    ids=["C17-k1", "C17-k2", "C17-k3"],
)  # fmt: skip
def test_estimators_by_hand(estimator, per_sample, mean):
    old = torch.zeros(2, dtype=torch.float64)
    values = estimator(old, torch.tensor([0.6931471805599453, -0.6931471805599453], dtype=torch.float64))
    np.testing.assert_allclose(values, per_sample, atol=1e-7)
    assert values.mean().item() == pytest.approx(mean, abs=1e-7)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_under_p_and_not_under_q(name):
    p, q = torch.log_softmax(LOGITS, 0), REFERENCE
    values = ESTIMATORS[name](p, q)
    assert (p.exp() * values).sum().item() == pytest.approx(exact_kl(p, q).item(), rel=1e-12)
    assert (q.exp() * values).sum().item() != pytest.approx(exact_kl(p, q).item(), rel=0.1)


def test_k2_is_biased_and_nearly_unbiased_where_the_policies_are_close():
    p = torch.log_softmax(LOGITS, 0)
    for scale, tolerance in ((1e-1, 0.1), (1e-2, 0.01), (1e-3, 0.001)):
        q = torch.log_softmax(LOGITS + scale * REFERENCE, 0)
        estimate, exact = (p.exp() * k2(p, q)).sum().item(), exact_kl(p, q).item()
        assert estimate == pytest.approx(exact, rel=tolerance)
    q = torch.log_softmax(-3.0 * LOGITS, 0)
    assert (p.exp() * k2(p, q)).sum().item() > 1.5 * exact_kl(p, q).item()


def test_k2_and_k3_are_never_negative_and_k3_is_exact_for_close_policies():
    p, q = torch.log_softmax(LOGITS, 0).float(), REFERENCE.float()
    assert (k1(p, q) < 0).any() and (k2(p, q) >= 0).all() and (k3(p, q) >= 0).all()
    # log-ratio 1e-4 in float32: exp(x) - 1 - x would be off by its rounding, 6e-8, twelve times the result
    tiny = k3(torch.zeros(1), torch.full((1,), 1e-4))
    assert tiny.item() == pytest.approx(5e-9, rel=1e-2)


def gradient(function):
    logits = LOGITS.clone().requires_grad_()
    function(torch.log_softmax(logits, 0)).backward()
    return logits.grad


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("k1", lambda p: 0.0 * p.sum()),
        ("k2", lambda p: exact_kl(p, REFERENCE)),
        ("k3", lambda p: exact_kl(REFERENCE, p)),
    ],
)
def test_expected_gradient_of_an_estimator_as_a_loss(name, divergence):
    """E over a ~ p, the sampling distribution held fixed, of the gradient of the estimator."""
    weights = torch.softmax(LOGITS, 0)
    expected = gradient(lambda p: (weights * ESTIMATORS[name](p, REFERENCE)).sum())
    np.testing.assert_allclose(expected, gradient(divergence), atol=1e-12)


def test_the_gradients_of_k2_and_k3_differ():
    forward, reverse = (gradient(lambda p, a=a: exact_kl(*((p, REFERENCE) if a else (REFERENCE, p))))
                        for a in (True, False))  # fmt: skip
    assert (forward - reverse).abs().max() > 0.1


OLD = torch.log_softmax(torch.tensor([-0.4, 0.9, 0.1, 0.6, -1.5], dtype=torch.float64), 0)


@pytest.mark.parametrize("name", ["k1", "k3"])
@pytest.mark.parametrize("old", [OLD, torch.log_softmax(LOGITS, 0)], ids=["moved", "on-policy"])
def test_bias_corrected_has_the_value_and_the_gradient_of_the_divergence(name, old):
    def expected(p):
        return (old.exp() * bias_corrected(ESTIMATORS[name](p, REFERENCE), p, old)).sum()

    p = torch.log_softmax(LOGITS, 0)
    assert expected(p).item() == pytest.approx(exact_kl(p, REFERENCE).item(), rel=1e-12)
    np.testing.assert_allclose(gradient(expected), gradient(lambda p: exact_kl(p, REFERENCE)), atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_without_the_correction_moved_samples_give_another_gradient(name):
    uncorrected = gradient(lambda p: (OLD.exp() * ESTIMATORS[name](p, REFERENCE)).sum())
    divergences = [gradient(lambda p: exact_kl(p, REFERENCE)), gradient(lambda p: exact_kl(REFERENCE, p))]
    assert all((uncorrected - right).abs().max() > 0.05 for right in divergences)


def test_bias_corrected_k2_needs_the_ratio_without_gradient():
    def expected(p, ratio_p):
        return (OLD.exp() * bias_corrected(k2(p, REFERENCE), ratio_p, OLD)).sum()

    right = gradient(lambda p: exact_kl(p, REFERENCE))
    own_mean = gradient(lambda p: (p.exp() * k2(p, REFERENCE)).sum())
    np.testing.assert_allclose(gradient(lambda p: expected(p, p.detach())), right, atol=1e-12)
    np.testing.assert_allclose(gradient(lambda p: expected(p, p)), own_mean, atol=1e-12)
    assert (own_mean - right).abs().max() > 0.01
