"""How steps of whole episodes become one loss: clip table, dual clip, weights, ratios, masks. By hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agents.batch import Batch
from agents.grpo import GRPOConfig, clipped_steps, grpo_loss
from agents.kl import ESTIMATORS
from agents.losses import (
    LOSS_TYPES,
    clipped_loss,
    loss_weights,
    masked_mean,
    sequence_log_ratio,
    weighted_loss,
)
from agents.policies.base import Evaluation
from agents.training import kl_ref

DOUBLE = torch.float64
NAN = float("nan")


def tensor(x: Any) -> torch.Tensor:
    return torch.tensor(x, dtype=DOUBLE)


def slopes(function, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """d function(x).sum() / dx by autograd and by central differences."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)
    differences = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        up, down = x.clone(), x.clone()
        up[place] += 1e-6
        down[place] -= 1e-6
        differences[place] = (function(up).sum() - function(down).sum()).item() / 2e-6
    return gradient.numpy(), differences


# --- one step ---

# For epsilon 0.2: ratio, loss and its slope at advantage 1, at advantage -1.
CLIP_TABLE = [
    (0.5, (-0.5, -1), (0.8, 0)),
    (0.9, (-0.9, -1), (0.9, 1)),
    (1.0, (-1.0, -1), (1.0, 1)),
    (1.1, (-1.1, -1), (1.1, 1)),
    (1.5, (-1.2, 0), (1.5, 1)),
]


@pytest.mark.parametrize(("ratio", "good", "bad"), CLIP_TABLE)
def test_the_clip_table_for_epsilon_a_fifth(ratio, good, bad):
    for advantage, (loss, slope) in ((1.0, good), (-1.0, bad)):

        def function(r, a=advantage):
            return clipped_loss(torch.log(r), torch.zeros(1, dtype=DOUBLE), tensor([a]), 0.2).loss

        assert function(tensor([ratio])).item() == pytest.approx(loss)
        for found in slopes(function, tensor([ratio])):
            assert found[0] == pytest.approx(slope, abs=1e-8)


def test_the_dual_clip_bounds_what_a_negative_advantage_costs():
    """delta 3: beyond it the loss is 3 and flat; a positive advantage is clipped at 1.2 as before."""
    ratio, advantages = tensor([2.0, 5.0, 0.5, 5.0, 0.9]), tensor([-1.0, -1, -1, 2, 2])

    def function(r):
        return clipped_loss(torch.log(r), torch.zeros(5, dtype=DOUBLE), advantages, 0.2, delta=3.0).loss

    np.testing.assert_allclose(function(ratio), [2.0, 3.0, 0.8, -2.4, -1.8], atol=1e-12)
    for found in slopes(function, ratio):
        np.testing.assert_allclose(found, [1, 0, 0, 0, -2], atol=1e-8)


def test_steps_whose_gradient_the_clip_stops():
    ratio, advantages = tensor([0.7, 0.7, 0.85, 1.25, 1.35, 1.35]), tensor([-1.0, 1, -1, 1, 1, -1])
    config = GRPOConfig(epsilon=0.2, epsilon_high=0.3)
    low, high = clipped_steps(ratio, advantages, config)
    assert low.tolist() == [True] + [False] * 5
    assert high.tolist() == [False] * 4 + [True, False]
    gradient, _ = slopes(
        lambda r: clipped_loss(torch.log(r), torch.zeros(6, dtype=DOUBLE), advantages, 0.2, 0.3).loss, ratio
    )
    assert ((gradient == 0) == (low | high).numpy()).all()


# --- from steps to one number ---

LOSSES, MASK = tensor([[1, 1, 1, 1], [6, NAN, NAN, NAN]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("grpo", (1 + 6) / 2), ("dapo", 10 / 5), ("bnpo", 10 / 5), ("dr_grpo", 10 / (2 * 8)), ("sum", 10 / 2)],
)
def test_each_loss_type_by_hand(loss_type, expected):
    weights = loss_weights(MASK, loss_type, 8)
    assert (weights[~MASK] == 0).all()
    assert weighted_loss(LOSSES, weights).item() == pytest.approx(expected)
    # Groups' minibatches of equal size: the mean of their losses is the loss of all, but for "bnpo".
    parts = [weighted_loss(LOSSES[i : i + 1], weights[i : i + 1]).item() for i in (0, 1)]
    assert np.mean(parts) == pytest.approx(expected)
    anew = [weighted_loss(LOSSES[i : i + 1], loss_weights(MASK[i : i + 1], "bnpo")).item() for i in (0, 1)]
    assert anew == pytest.approx([1, 6])


def test_loss_types_that_are_unknown_or_incomplete():
    with pytest.raises(ValueError, match="loss_type='drgrpo' is unknown; allowed: grpo, dapo, bnpo, dr_grpo"):
        loss_weights(MASK, "drgrpo")
    with pytest.raises(ValueError, match="give max_completion_length"):
        loss_weights(MASK, "dr_grpo")


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_masked_steps_leave_the_denominator_too_D13(loss_type):
    """(1 + 3) / 2 where the cut completion is masked; 0.8 divides by steps that do not count."""
    mask, cut = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), torch.tensor([0, 1]).bool()
    losses = tensor([[1, 3, 0], [7, 7, 7]])
    assert weighted_loss(losses, loss_weights(mask & ~cut.unsqueeze(1), loss_type)).item() == pytest.approx(2)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_with_everything_masked_loss_and_gradient_are_zero_D14(loss_type):
    losses = tensor([[7.0, 7.0], [NAN, 7.0]]).requires_grad_()
    weights = loss_weights(torch.zeros(2, 2), loss_type, 4)
    loss = weighted_loss(losses, weights)
    loss.backward()
    assert loss.item() == 0.0 and losses.grad is not None and losses.grad.tolist() == [[0, 0], [0, 0]]
    empty = weighted_loss(torch.zeros(0, 2), loss_weights(torch.zeros(0, 2), loss_type, 4))
    assert empty.item() == 0.0


def test_means_over_masked_rows_leave_them_out_D23():
    kl, mask = tensor([[1, 1], [9, 9]]), torch.tensor([[1, 1], [0, 0]])
    assert masked_mean(kl, mask).item() == 1.0
    zeros = torch.zeros(2, 2)
    batch = Batch(zeros, zeros, kl, zeros, zeros, zeros, zeros, mask.bool())
    assert kl_ref(batch) == {"train/kl_ref": 1.0}
    assert kl_ref(replace(batch, ref_log_probs=None)) == {}


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_steps():
    logp = tensor([[-1.0, -2.0, NAN], [-1.0, -1.0, -1.0]])
    old = tensor([[-1.2, -2.4, 0.0], [-1.0, -0.7, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    log_ratio = sequence_log_ratio(logp, old, mask)
    np.testing.assert_allclose(log_ratio, [[0.3] * 3, [-0.1] * 3])
    ratios = np.exp([0.2, 0.4])
    assert torch.exp(log_ratio[0, 0]).item() == pytest.approx(np.sqrt(ratios.prod()))
    x = torch.nan_to_num(logp)
    for found in slopes(lambda x: sequence_log_ratio(x, old, mask)[:, :1], x):
        np.testing.assert_allclose(found, [[1 / 2, 1 / 2, 0], [1 / 3] * 3], atol=1e-8)
    nothing = sequence_log_ratio(logp, old, torch.zeros(2, 3).bool())
    assert nothing.tolist() == [[0.0] * 3] * 2


# --- the whole loss ---


def some_batch(loss_type: str = "grpo", seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """Four completions of lengths 3, 1, 2, 3, and current log-probs; 5 where nothing is to be read."""
    rng = np.random.default_rng(seed)
    mask = torch.arange(3) < torch.tensor([[3], [1], [2], [3]])

    def field(scale):
        return torch.where(mask, tensor(scale * rng.normal(size=(4, 3))), 5.0)

    logp, old, ref = -2.0 + field(0.3), -2.0 + field(0.3), -2.0 + field(0.5)
    advantages = torch.where(mask, tensor([[1.0], [-1.0], [0.5], [-2.0]]), 0.0)
    zeros = torch.zeros(4, 3, dtype=DOUBLE)
    weights = loss_weights(mask, loss_type, 5).to(DOUBLE)
    return Batch(zeros, zeros, old, ref, advantages, zeros, zeros, mask, weights), logp


def loss_of(logp: torch.Tensor, batch: Batch, config: GRPOConfig):
    return grpo_loss(Evaluation(logp, torch.full_like(logp, 0.7), torch.zeros_like(logp)), batch, config)


def by_loops(logp, batch: Batch, cfg: GRPOConfig) -> float:
    """The loss once more, one step after the other, from the formulas of the papers."""
    lengths = batch.mask.sum(1).tolist()
    divisor = {"grpo": None, "dapo": sum(lengths), "bnpo": sum(lengths), "dr_grpo": 4 * 5, "sum": 4}
    total = 0.0
    for i, length in enumerate(lengths):
        log_ratios = (logp - batch.old_log_probs)[i, :length].tolist()
        for t in range(length):
            sequence = cfg.importance_sampling_level == "sequence"
            ratio = np.exp(np.mean(log_ratios) if sequence else log_ratios[t])
            advantage = batch.advantages[i, t].item()
            bounded = min(ratio, cfg.delta) if cfg.delta is not None else ratio
            clipped = min(max(ratio, 1 - cfg.epsilon), 1 + cfg.upper_epsilon)
            loss = -min(bounded * advantage, clipped * advantage)
            if cfg.beta and cfg.kl_in == "loss":
                difference = (batch.ref_log_probs - logp)[i, t].item()
                kl = {"k1": -difference, "k2": difference**2 / 2,
                      "k3": np.exp(difference) - 1 - difference}[cfg.kl_estimator]  # fmt: skip
                loss += cfg.beta * kl * (np.exp(log_ratios[t]) if cfg.use_bias_correction_kl else 1.0)
            total += loss / (divisor[cfg.loss_type] or 4 * length)
    return total


CONFIGS: list[dict[str, Any]] = [
    *({"loss_type": name, "max_completion_length": 5} for name in LOSS_TYPES),
    {"importance_sampling_level": "sequence"}, {"delta": 1.3}, {"epsilon": 0.1, "epsilon_high": 0.3},
    *({"beta": 0.3, "kl_estimator": name} for name in ESTIMATORS),
    *({"beta": 0.3, "kl_estimator": name, "use_bias_correction_kl": True} for name in ESTIMATORS),
    {"beta": 0.3, "kl_in": "reward"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_loss_is_that_of_the_formulas_and_its_gradient_its_slope(config):
    cfg = GRPOConfig(**{"loss_type": "grpo", **config})
    batch, logp = some_batch(cfg.loss_type)
    terms = loss_of(logp, batch, cfg)
    assert terms.total.item() == pytest.approx(by_loops(logp, batch, cfg), rel=1e-6)  # weights are float32
    assert terms.entropy.item() == pytest.approx(0.7)
    with_kl = cfg.beta > 0 and cfg.kl_in == "loss"
    expected = terms.policy + (cfg.beta * terms.kl if with_kl else 0.0)
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert terms.ratio.shape == (9,) and terms.ratio.isfinite().all()
    if cfg.use_bias_correction_kl and cfg.kl_estimator == "k2":
        return  # not its slope: see below
    autograd, differences = slopes(lambda x: loss_of(x, batch, cfg).total, logp)
    np.testing.assert_allclose(autograd, differences, atol=1e-8)
    assert (autograd[~batch.mask.numpy()] == 0).all() and np.abs(autograd).max() > 0.01


def test_the_correction_of_k2_is_a_weight_without_a_gradient():
    """Its gradient is the ratio times that of k2, ``log pi - log ref``, at each step."""
    batch, logp = some_batch("sum")
    config = {"loss_type": "sum", "kl_estimator": "k2", "use_bias_correction_kl": True}

    def gradient(beta: float) -> torch.Tensor:
        leaf = logp.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss_of(leaf, batch, GRPOConfig(**config, beta=beta)).total, leaf)
        return found

    expected = torch.exp(logp - batch.old_log_probs) * (logp - batch.ref_log_probs) / 4 * batch.mask
    np.testing.assert_allclose(gradient(1.0) - gradient(0.0), expected, atol=1e-6)
