"""Losses on preference pairs: by hand, by finite differences, in expectation, and beside TRL's."""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agents.preference_losses import (
    LOSS_TYPES,
    bradley_terry_loss,
    conservative_labels,
    dpo_loss,
    logistic_loss,
    preference_accuracy,
    robust_labels,
)


def tensor(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def ell(z):
    """-ln sigmoid(z), written out."""
    return math.log(1 + math.exp(-z))


# --- by hand ---


def test_dpo_loss_and_rewards_E03():
    chosen, rejected = tensor([-3.0]) - tensor([-4.0]), tensor([-5.0]) - tensor([-4.0])
    assert dpo_loss(chosen, rejected, 0.1).item() == pytest.approx(0.5981389, abs=1e-6)
    assert (0.1 * chosen).item() == pytest.approx(0.1) and (0.1 * rejected).item() == pytest.approx(-0.1)


def test_sums_and_means_differ_even_in_sign_E04():
    chosen, rejected = tensor([-3.0]), tensor([-2.0])
    lengths = {"chosen_lengths": torch.tensor([3]), "rejected_lengths": torch.tensor([1])}
    sums, means = dpo_loss(chosen, rejected, 1.0), dpo_loss(chosen, rejected, 1.0, "sigmoid_norm", **lengths)
    assert sums.item() == pytest.approx(1.3132617, abs=1e-6)
    assert means.item() == pytest.approx(0.3132617, abs=1e-6)
    # IPO at beta 1 wants a difference of 1/2: sums give -1, means give +1.
    assert dpo_loss(chosen, rejected, 1.0, "ipo").item() == pytest.approx(2.25)
    assert dpo_loss(chosen, rejected, 1.0, "ipo_norm", **lengths).item() == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "expected"),
    [("sigmoid", 0.0, 0.126928), ("sigmoid", 0.1, 0.326928), ("robust", 0.1, -0.123072),
     ("robust", 0.0, 0.126928)],
)  # fmt: skip
def test_label_smoothing_conservative_and_robust_E05(loss_type, smoothing, expected):
    """beta h = 2; the robust loss may be negative."""
    loss = dpo_loss(tensor([4.0]), tensor([0.0]), 0.5, loss_type, smoothing)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_margins_E06(dtype):
    chosen = tensor([0, 0, 1000], dtype).requires_grad_()
    rejected = tensor([100, 1000, 0], dtype)
    loss = bradley_terry_loss(chosen, rejected)
    loss.sum().backward()
    assert loss.dtype == dtype and loss.tolist() == [100, 1000, 0]
    assert chosen.grad is not None and chosen.grad.tolist() == [-1, -1, 0]


@pytest.mark.parametrize("loss_type", ["sigmoid", "robust"])
def test_dpo_with_large_log_ratios_is_as_stable(loss_type):
    chosen = tensor([-1e4, 1e4], torch.float32).requires_grad_()
    loss = dpo_loss(chosen, torch.zeros(2), 1.0, loss_type, 0.1)
    loss.sum().backward()
    by_hand = [9e3, 1e3] if loss_type == "sigmoid" else [9e3 / 0.8, -1e3 / 0.8]
    np.testing.assert_allclose(loss.detach(), by_hand, rtol=1e-5)
    assert chosen.grad is not None and bool(chosen.grad.isfinite().all())


def test_a_tie_costs_ln_2_and_moves_nothing_that_both_share_E07():
    score = tensor([0.3]).requires_grad_()
    loss = bradley_terry_loss(score, score)
    loss.backward()
    assert loss.item() == pytest.approx(0.6931472, abs=1e-6)
    assert score.grad is not None and score.grad.item() == 0.0


def test_margins_are_inside_the_sigmoid_and_not_broadcast_E08():
    chosen, rejected, margins = tensor([[1.0], [2.0]]), tensor([[0.0], [0.0]]), tensor([1.0, 2.0])
    loss = bradley_terry_loss(chosen, rejected, margins)
    np.testing.assert_allclose(loss, [0.6931472] * 2, atol=1e-6)
    assert loss.mean().item() == pytest.approx(0.6931472, abs=1e-6)


def test_other_shapes_are_refused():
    two, three = tensor([1.0, 2.0]), tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"rejected has shape \(3,\); allowed: \(2,\) or \(2, 1\)"):
        bradley_terry_loss(two, three)
    with pytest.raises(ValueError, match=r"margins has shape \(2, 2\)"):
        bradley_terry_loss(two, two, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"chosen has shape \(2, 2\); allowed: \[B\] or \[B, 1\]"):
        dpo_loss(torch.zeros(2, 2), torch.zeros(2, 2), 0.1)
    with pytest.raises(ValueError, match=r"labels has shape \(3,\)"):
        dpo_loss(two, two, 0.1, labels=three)


@pytest.mark.parametrize("loss_type", ["sigmoid_norm", "ipo_norm"])
def test_the_mean_of_an_empty_completion_is_finite_E14(loss_type):
    """An empty answer has log-ratio 0; its length 0 must not divide."""
    chosen = torch.zeros(1, requires_grad=True)
    zero, two = torch.tensor([0]), torch.tensor([2])
    loss = dpo_loss(chosen, torch.tensor([-3.0]), 0.5, loss_type, chosen_lengths=zero, rejected_lengths=two)
    loss.sum().backward()
    expected = ell(0.75) if loss_type == "sigmoid_norm" else (1.5 - 1.0) ** 2
    assert loss.item() == pytest.approx(expected)
    assert chosen.grad is not None and math.isfinite(chosen.grad.item())


def test_what_dpo_cannot_compute_is_named():
    x = tensor([1.0])
    with pytest.raises(ValueError, match="loss_type='hinge' is unknown; allowed: sigmoid, sigmoid_norm"):
        dpo_loss(x, x, 0.1, "hinge")
    with pytest.raises(ValueError, match="'ipo_norm' needs chosen_lengths and rejected_lengths"):
        dpo_loss(x, x, 0.1, "ipo_norm")
    with pytest.raises(ValueError, match="margins are defined for the logistic losses, not for 'ipo'"):
        dpo_loss(x, x, 0.1, "ipo", margins=x)
    assert dpo_loss(x, x, 0.5, "ipo", margins=tensor([0.0])).item() == 1.0


def test_accuracy_counts_ties_half_and_soft_labels_by_their_probability():
    margin, labels = tensor([2.0, -2.0, 0.0, 2.0]), tensor([1.0, 1.0, 1.0, 0.7])
    np.testing.assert_allclose(preference_accuracy(margin, labels), [1.0, 0.0, 0.5, 0.7])


# --- properties ---


def arguments(seed=0, n=40):
    rng = np.random.default_rng(seed)
    chosen, rejected = (tensor(rng.normal(size=n) * 3) for _ in range(2))
    lengths = [torch.from_numpy(rng.integers(1, 9, n)) for _ in range(2)]
    return chosen, rejected, lengths, tensor(rng.random(n)), tensor(rng.normal(size=n))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_is_the_slope(loss_type):
    chosen, rejected, lengths, labels, margins = arguments()

    def loss(x):
        m = None if loss_type.startswith("ipo") else margins
        return dpo_loss(x, rejected, 0.4, loss_type, 0.2, labels, m, *lengths)

    x = chosen.clone().requires_grad_()
    loss(x).sum().backward()
    slope = (loss(chosen + 1e-6) - loss(chosen - 1e-6)) / 2e-6
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, slope, atol=1e-7)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_soft_label_is_the_expectation_over_hard_ones(loss_type):
    chosen, rejected, lengths, labels, _ = arguments(1)
    soft = dpo_loss(chosen, rejected, 0.4, loss_type, 0.2, labels, None, *lengths)
    won = dpo_loss(chosen, rejected, 0.4, loss_type, 0.2, None, None, *lengths)
    lost = dpo_loss(rejected, chosen, 0.4, loss_type, 0.2, None, None, *reversed(lengths))
    np.testing.assert_allclose(soft, labels * won + (1 - labels) * lost, rtol=1e-12)


def test_the_robust_loss_on_flipped_labels_is_on_average_the_loss_on_true_ones():
    chosen, rejected, _, labels, _ = arguments(2)
    e = 0.3
    kept = dpo_loss(chosen, rejected, 0.4, "robust", e)
    flipped = dpo_loss(rejected, chosen, 0.4, "robust", e)
    np.testing.assert_allclose((1 - e) * kept + e * flipped, dpo_loss(chosen, rejected, 0.4), rtol=1e-10)
    np.testing.assert_allclose(robust_labels(conservative_labels(labels, e), e), labels, atol=1e-12)


def test_dpo_is_the_bradley_terry_loss_of_implicit_rewards():
    chosen, rejected, _, labels, margins = arguments(3)
    expected = bradley_terry_loss(0.4 * chosen, 0.4 * rejected, margins, labels)
    np.testing.assert_allclose(dpo_loss(chosen, rejected, 0.4, labels=labels, margins=margins), expected)
    np.testing.assert_allclose(logistic_loss(tensor([0.7])), [ell(0.7)])


# --- an independent implementation ---


@pytest.mark.parametrize(
    ("loss_type", "theirs"),
    [("sigmoid", "sigmoid"), ("robust", "robust"), ("ipo_norm", "ipo"), ("sigmoid_norm", "sigmoid_norm")],
)
def test_losses_gradients_and_statistics_of_trl(loss_type, theirs):
    """TRL's trainer computes its loss on per-token log-probs that we give it instead of a model's."""
    DPOTrainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    beta, smoothing, n, width = 0.3, 0.1 if theirs == "robust" else 0.0, 4, 7
    lengths = torch.tensor([3, 2, 4, 1, 1, 4, 2, 3])  # chosen, then rejected
    completion = torch.zeros(2 * n, width, dtype=torch.int64)
    for row, length in enumerate(lengths.tolist()):
        completion[row, 2 : 2 + length] = 1
    mask = completion[:, 1:] > 0
    generator = torch.Generator().manual_seed(0)
    shape = (2 * n, width - 1)
    token_logps = (-3 * torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    reference = (-3 * torch.rand(shape, generator=generator, dtype=torch.float64) * mask).sum(1)

    def model(labels, **_):
        real = labels[:, 1:] != -100
        zeros = torch.zeros(shape)
        return SimpleNamespace(log_probs=token_logps * real, entropy=zeros, mean_logits=zeros, is_top1=real)

    def same(x):
        return x

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), aux_loss_enabled=False, ld_alpha=None, beta=beta,
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[theirs], loss_weights=[1.0],
        label_smoothing=smoothing, use_weighting=False, _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
    )  # fmt: skip
    ids = torch.ones(2 * n, width, dtype=torch.int64)
    inputs = {"completion_mask": completion, "input_ids": ids, "attention_mask": ids,
              "ref_chosen_logps": reference[:n], "ref_rejected_logps": reference[n:]}  # fmt: skip
    expected = DPOTrainer._compute_loss(trainer, model, inputs, False)
    (expected_gradient,) = torch.autograd.grad(expected, token_logps)

    ratios = (token_logps * mask).sum(1) - reference
    ours = dpo_loss(
        ratios[:n], ratios[n:], beta, loss_type, smoothing,
        chosen_lengths=lengths[:n], rejected_lengths=lengths[n:],
    ).mean()  # fmt: skip
    (gradient,) = torch.autograd.grad(ours, token_logps)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-10)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-12)
    margin = beta * (ratios[:n] - ratios[n:]).detach()
    metrics = trainer._metrics["eval"]
    assert metrics["rewards/margins"] == [pytest.approx(margin.mean().item())]
    accuracy = preference_accuracy(margin, torch.ones(n)).mean().item()
    assert metrics["rewards/accuracies"] == [pytest.approx(accuracy)]
