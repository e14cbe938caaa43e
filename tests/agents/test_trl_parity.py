"""Loss, gradient and advantages beside TRL's, on one fixed batch.

TRL's own methods compute its side. They are given a stand-in for the trainer, whose model is a table of
log-probs: nothing is generated and no weights are needed, and the gradient is that in the log-probs.
"""

from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agents.advantages import group_advantages, leave_one_out
from agents.batch import Batch
from agents.grpo import GRPOConfig, clipped_steps, grpo_loss
from agents.losses import loss_weights, policy_gradient_loss, weighted_loss
from agents.policies.base import Evaluation
from agents.presets import PRESETS, preset

pytest.importorskip("trl")
if not metadata.version("trl").startswith("1.16."):
    pytest.skip("the stand-in below has what TRL 1.16 reads of a trainer", allow_module_level=True)
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

N_GROUPS, SIZE, LENGTH = 3, 4, 6
B = N_GROUPS * SIZE
EOS, PAD, TOKEN = 7, 0, 3
NAN = float("nan")


@dataclass
class Sample:
    """A batch of completions: lengths and rewards [B], log-probs [B, LENGTH], which of them a limit cut."""

    lengths: torch.Tensor
    cut: torch.Tensor
    rewards: torch.Tensor
    logp: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        return torch.arange(LENGTH) < self.lengths.unsqueeze(1)

    @property
    def group_ids(self) -> torch.Tensor:
        return torch.arange(N_GROUPS).repeat_interleave(SIZE)


def sample(seed: int = 0) -> Sample:
    """Ratios on both sides of every clip range; a group of equal rewards, and a reward that is missing."""
    rng = np.random.default_rng(seed)
    rewards = torch.tensor([1.0, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, 3, -1, NAN, 0.25])
    logp = torch.tensor(-2.0 + rng.normal(size=(B, LENGTH)), dtype=torch.float32)
    old, ref = (logp + torch.tensor(scale * rng.normal(size=(B, LENGTH))).float() for scale in (0.4, 0.6))
    lengths = torch.tensor([6, 1, 3, 2, 4, 4, 5, 6, 2, 3, 6, 5])
    return Sample(lengths, lengths == LENGTH, rewards, logp, old, ref)


class Model:
    """Stands for a model in TRL's methods, which only pass it on and ask it these two things."""

    training, is_gradient_checkpointing = True, False


def stand_in(given: Sample, logp: torch.Tensor, **settings: Any) -> Any:
    """What TRL's methods read of a trainer, single process, one gradient step per batch."""
    policy, reference = Model(), Model()
    tables = {policy: given.old, reference: given.ref, "differentiated": logp}

    def log_probs(model, *args, **kwargs):
        table = tables[model]
        return table, torch.ones_like(table.detach()), None

    completions = [[TOKEN] * (n - 1) + [TOKEN if cut else EOS] for n, cut in
                   zip(given.lengths.tolist(), given.cut.tolist(), strict=True)]  # fmt: skip
    generated = ([[1, 2]] * B, completions, None, [""] * B, None, None, None, None)
    trainer = SimpleNamespace(
        model=policy, ref_model=reference, _get_per_token_logps_and_entropies=log_probs,
        accelerator=SimpleNamespace(
            device="cpu", num_processes=1, process_index=0, gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        args=SimpleNamespace(
            steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=B,
            gradient_checkpointing_kwargs=None, delta=None, use_bias_correction_kl=False,
        ),
        num_generations=SIZE, num_iterations=2, current_gradient_accumulation_steps=1,
        environment_factories=None, environments=None, tools=None, use_vllm=False,
        mask_truncated_completions=False,
        _tokenizer=SimpleNamespace(pad_token_id=PAD), eos_token_ids=[EOS], eos_token_id=EOS,
        pad_to_multiple_of=None, _generate=lambda prompts: generated,
        _calculate_rewards=lambda *args: given.rewards.unsqueeze(1).clone(),
        reward_weights=torch.ones(1), reward_funcs=[None], reward_func_names=["reward"],
        reward_clip_range=None,
        multi_objective_aggregation="sum_then_normalize", scale_rewards="group", normalize_advantages=False,
        beta=0.0, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token",
        max_completion_length=LENGTH, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, log_multimodal=False,
        _metrics={"train": defaultdict(list)}, _pending_extra_logs={}, _pending_metrics={},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
    )  # fmt: skip
    for name, value in settings.items():
        setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)
    return trainer


def trl_inputs(trainer: Any, kind: Any = GRPOTrainer) -> dict[str, Any]:
    """What TRL makes of the completions, without the gradient: masks, advantages, log-probs."""
    return kind._generate_and_score_completions(trainer, [{"prompt": "p"}] * B)


def trl_loss(given: Sample, **settings: Any) -> tuple[float, torch.Tensor, Any]:
    """TRL's loss, its gradient in the log-probs, and the trainer with its metrics."""
    leaf = given.logp.clone().requires_grad_()
    trainer = stand_in(given, leaf, **settings)
    loss = GRPOTrainer._compute_loss(trainer, "differentiated", trl_inputs(trainer))
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient, trainer


def our_loss(given: Sample, config: GRPOConfig) -> tuple[float, torch.Tensor, Batch, Any]:
    """Ours, from rewards to the gradient, as `agents.grpo.GRPO.prepare` and ``loss`` go about it."""
    mask = given.mask & ~given.cut.unsqueeze(1) if config.mask_truncated_completions else given.mask
    std = None if config.scale_rewards == "none" else config.std
    scale = "batch" if config.scale_rewards == "batch" else "group"
    advantages = group_advantages(given.rewards, given.group_ids, std, config.std_eps, scale)
    zeros = torch.zeros(B, LENGTH)
    weights = loss_weights(mask, config.loss_type, config.max_completion_length)
    advantages = advantages.unsqueeze(1).expand(B, LENGTH)
    batch = Batch(zeros, zeros, given.old, given.ref, advantages, zeros, zeros, mask, weights)
    leaf = given.logp.clone().requires_grad_()
    terms = grpo_loss(Evaluation(leaf, zeros, zeros), batch, config)
    (gradient,) = torch.autograd.grad(terms.total, leaf)
    return terms.total.item(), gradient, batch, terms


def assert_same(given: Sample, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    config = GRPOConfig(max_completion_length=LENGTH, num_generations=SIZE, **ours)
    loss, gradient, batch, terms = our_loss(given, config)
    their_loss, their_gradient, trainer = trl_loss(given, **theirs)
    assert loss == pytest.approx(their_loss, abs=1e-5)
    np.testing.assert_allclose(gradient, their_gradient, atol=1e-5)
    assert gradient.abs().max() > 1e-3 and their_gradient.abs().max() > 1e-3
    metrics = trainer._metrics["train"]
    if config.importance_sampling_level == "token" and config.delta is None:
        low, high = clipped_steps(terms.ratio.detach(), batch.steps(batch.advantages), config)
        assert low.float().mean().item() == pytest.approx(metrics["clip_ratio/low_mean"][0], abs=1e-6)
        assert high.float().mean().item() == pytest.approx(metrics["clip_ratio/high_mean"][0], abs=1e-6)


# --- the loss, switch by switch ---

# Ours, and what TRL has besides.
SWITCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"importance_sampling_level": "sequence"}, {}),
    ({"delta": 1.5}, {}),
    ({"epsilon": 0.1, "epsilon_high": 0.3}, {"epsilon_low": 0.1, "epsilon_high": 0.3}),
    ({"beta": 0.3}, {}),
    ({"beta": 0.3, "use_bias_correction_kl": True}, {}),
    ({"beta": 0.3, "mask_truncated_completions": True}, {}),
    ({"scale_rewards": "batch"}, {}),
    ({"scale_rewards": "none"}, {}),
]
RENAMED = ("epsilon", "epsilon_high")


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("ours", "more"), SWITCHES, ids=[str(ours) for ours, _ in SWITCHES])
def test_loss_and_gradient_are_trls(loss_type, ours, more):
    theirs = {name: value for name, value in ours.items() if name not in RENAMED}
    kind = {"loss_type": loss_type}
    for seed in (0, 1):
        assert_same(sample(seed), kind | ours, kind | theirs | more)


@pytest.mark.parametrize("name", sorted(name for name in PRESETS if "not tested" not in PRESETS[name].tested))
def test_every_preset_that_says_so_is_compared_with_trl(name):
    """The preset's switches on our side, and on TRL's those of the same names."""
    ours = preset(name)
    theirs = {"loss_type": ours["loss_type"], "scale_rewards": ours["scale_rewards"], "beta": ours["beta"],
              "epsilon_low": ours["epsilon"], "epsilon_high": ours.get("epsilon_high", ours["epsilon"]),
              "mask_truncated_completions": ours.get("mask_truncated_completions", False),
              "use_bias_correction_kl": ours.get("use_bias_correction_kl", False),
              "importance_sampling_level": ours.get("importance_sampling_level", "token")}  # fmt: skip
    given = sample()
    if name == "gspo":  # its clip range is a thousandth of the others'
        given.old = given.logp + 1e-3 * (given.old - given.logp)
    assert_same(given, ours, theirs)


def test_the_comparison_can_fail():
    given = sample()
    for ours in ({"loss_type": "grpo"}, {"epsilon": 0.25}, {"std": "population"}, {"delta": 1.5}):
        with pytest.raises(AssertionError):
            assert_same(given, {"loss_type": "dapo", **ours}, {"loss_type": "dapo"})


# --- advantages ---


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_trls(scale):
    """Three groups, one of equal rewards, one with a reward that is missing."""
    given = sample()
    found = trl_inputs(stand_in(given, given.logp, scale_rewards=scale))["advantages"]
    std, pool = (None, "group") if scale == "none" else ("sample", scale)
    ours = group_advantages(given.rewards, given.group_ids, std, 1e-4, pool)
    np.testing.assert_allclose(ours, found, atol=1e-5)
    assert (ours[SIZE : 2 * SIZE] == 0).all() and ours[10] == 0 and (ours != 0).sum() == 7


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloos_advantages_and_gradient_are_trls(beta):
    given = sample()
    leaf = given.old.clone().requires_grad_()  # on-policy, as one gradient step is
    trainer = stand_in(given, leaf, beta=beta)
    generated = [[1, 2]] * B, [[TOKEN] * n for n in given.lengths.tolist()], [""] * B
    trainer._generate = lambda prompts: generated
    inputs = trl_inputs(trainer, RLOOTrainer)
    rewards = given.rewards - beta * torch.where(given.mask, given.old - given.ref, 0.0).sum(1)
    advantages = leave_one_out(rewards, given.group_ids)
    np.testing.assert_allclose(advantages, inputs["advantages"], atol=1e-5)
    assert (advantages != 0).sum() == (7 if beta == 0 else 11)

    (theirs,) = torch.autograd.grad(RLOOTrainer._compute_loss(trainer, "differentiated", inputs), leaf)
    ours = given.old.clone().requires_grad_()
    losses = policy_gradient_loss(ours, advantages.unsqueeze(1))
    (gradient,) = torch.autograd.grad(weighted_loss(losses, loss_weights(given.mask, "sum")), ours)
    np.testing.assert_allclose(gradient, theirs, atol=1e-5)
    assert gradient.abs().max() > 0.01
