"""Direct preference optimisation: a policy from preferences, without a reward model and without sampling.

    preferences --> log-ratios of whole answers to a frozen reference --> loss of their difference

Sources: Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward
Model" (2023), and those of `agents.preference_losses`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents import fitting, training
from agents.agent import as_vector_env
from agents.policies.base import Policy
from agents.preference_losses import LOSS_TYPES, dpo_loss, preference_accuracy
from agents.preferences import Preferences, answer_log_probs


@dataclass(frozen=True)
class DPOConfig:
    """Fields as in TRL where it has them; a batch is a number of pairs.

    ====================  ==========================================================================
    beta                  weight of the KL to the reference that the loss stands for, > 0
    loss_type             "sigmoid", "sigmoid_norm", "robust", "ipo" or "ipo_norm"; see
                          `agents.preference_losses.dpo_loss` (TRL's "ipo" is "ipo_norm" here)
    label_smoothing       share of labels taken to be flipped, below 0.5
    learning_rate         Adam's step size; a number or "lin_0.001"
    batch_size            pairs per gradient step; the last one of an epoch may be smaller
    n_epochs              passes over the data
    max_grad_norm         the gradient is scaled down to this norm; None: off
    policy, policy_kwargs as in PPO
    ====================  ==========================================================================
    """

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    learning_rate: float | str = 1e-3
    batch_size: int = 64
    n_epochs: int = 1
    max_grad_norm: float | None = 1.0
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(self, beta="> 0", label_smoothing="in [0, 1]")
        if self.label_smoothing >= 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing!r} must be below 0.5: half the labels")
        training.check_choice("loss_type", self.loss_type, LOSS_TYPES)
        fitting.check_fit_config(self)


@dataclass
class Pairs:
    """Preferences with the reference's log-probs of their answers, [B] each."""

    preferences: Preferences
    ref_chosen: Tensor
    ref_rejected: Tensor

    def __len__(self) -> int:
        return len(self.preferences)

    def select(self, index: Tensor) -> Pairs:
        """The pairs at ``index``."""
        return Pairs(self.preferences.select(index), self.ref_chosen[index], self.ref_rejected[index])


class DPO:
    """DPO of a policy for an environment's observations and actions.

    Args:
        env: a Gymnasium Env or VectorEnv; `fit` only needs its spaces.
        seed: seeds weights and the order of the data.
        reference: policy that the log-ratios are to; None: the policy as it is before any training.
        config: fields of `DPOConfig`.
    """

    algorithm = "dpo"

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(DPOConfig, config)
        self.env = as_vector_env(env)
        self.generator = training.make_generator(seed)
        self.policy = training.build_policy(
            self.config.policy, self.env, self.generator, self.config.policy_kwargs
        )
        self.reference = training.frozen(reference)
        self.start = training.frozen(self.policy)
        self.optimizer = training.FlatAdam(self.policy)
        self.num_timesteps = 0
        self.n_updates = 0

    def prepare(self, preferences: Preferences) -> Pairs:
        """The preferences with the reference's log-probs, which do not change while the policy does."""
        reference = self.start if self.reference is None else self.reference
        assert reference is not None
        with training.single_thread(), torch.no_grad():
            parts = [
                (answer_log_probs(reference, part.chosen), answer_log_probs(reference, part.rejected))
                for part in fitting.shuffled(preferences, 256, None)
            ]
        chosen, rejected = zip(*parts, strict=True)
        return Pairs(preferences, torch.cat(chosen), torch.cat(rejected))

    def loss(self, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean `dpo_loss` over the pairs, and the metrics."""
        cfg, given = self.config, pairs.preferences
        chosen = answer_log_probs(self.policy, given.chosen) - pairs.ref_chosen
        rejected = answer_log_probs(self.policy, given.rejected) - pairs.ref_rejected
        loss = dpo_loss(
            chosen, rejected, cfg.beta, cfg.loss_type, cfg.label_smoothing, given.labels, given.margins,
            given.chosen.lengths, given.rejected.lengths,
        ).mean()
        margin = cfg.beta * (chosen - rejected).detach()
        return loss, {
            "dpo/loss": loss.detach(),
            "dpo/chosen_logratio": chosen.detach().mean(),
            "dpo/rejected_logratio": rejected.detach().mean(),
            "dpo/margin": margin.mean(),
            "dpo/accuracy": preference_accuracy(margin, given.labels).mean(),
        }

    def fit(
        self, preferences: Preferences, run_dir: str | Path | None = None, progress_bar: bool = False
    ) -> list[dict[str, float]]:
        """Train on the pairs; returns the metrics (see `agents.fitting.fit`)."""
        lines = fitting.fit(
            self.prepare(preferences), self.loss, self.optimizer, self.config, self.generator,
            self.n_updates, run_dir, progress_bar,
        )
        self.n_updates = int(lines[-1]["train/n_updates"])
        return lines

    def evaluate(self, preferences: Preferences) -> dict[str, float]:
        """Loss, log-ratios, margin and accuracy on other pairs, such as held-out ones."""
        return fitting.evaluate(self.prepare(preferences), self.loss, self.config.batch_size)
