"""Supervised fine-tuning: next-token cross-entropy on responses only.

The prompt is read and never predicted: the loss is over the actions of `Responses`. For a policy whose
one action is the answer it is maximum likelihood of the answers.

Source: Ouyang et al., "Training language models to follow instructions with human feedback" (2022),
section 3.5, step one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents import fitting, training
from agents.policies.base import Policy
from agents.preferences import Responses, answer_log_probs


@dataclass(frozen=True)
class SFTConfig:
    """
    ====================  ==========================================================================
    learning_rate         Adam's step size; a number or "lin_0.001"
    batch_size            answers per gradient step; the last one of an epoch may be smaller
    n_epochs              passes over the data
    max_grad_norm         the gradient is scaled down to this norm; None: off
    ====================  ==========================================================================
    """

    learning_rate: float | str = 1e-3
    batch_size: int = 64
    n_epochs: int = 1
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        fitting.check_fit_config(self)


def sft_loss(policy: Policy, responses: Responses) -> Tensor:
    """Mean over all response tokens of the batch of ``-log pi(token | what is before it)``, in nats.

    Each token weighs the same, so that a long response weighs more than a short one. 0 where no row
    has a token.
    """
    return -answer_log_probs(policy, responses).sum() / responses.lengths.sum().clamp(min=1)


class SFT:
    """Trains a policy, in place, to give the responses it is shown.

    Args:
        policy: any `Policy` that is a torch module.
        seed: of the order of the data.
        config: fields of `SFTConfig`.
    """

    def __init__(self, policy: Any, seed: int | None = None, **config: Any) -> None:
        self.config = training.make_config(SFTConfig, config)
        self.policy = policy
        self.generator = training.make_generator(seed)
        self.optimizer = training.FlatAdam(policy)
        self.n_updates = 0

    def loss(self, responses: Responses) -> tuple[Tensor, dict[str, Tensor]]:
        """`sft_loss` and its metrics."""
        loss = sft_loss(self.policy, responses)
        return loss, {"sft/loss": loss.detach()}

    def fit(
        self, responses: Responses, run_dir: str | Path | None = None, progress_bar: bool = False
    ) -> list[dict[str, float]]:
        """Train on the responses; returns the metrics (see `agents.fitting.fit`)."""
        lines = fitting.fit(
            responses, self.loss, self.optimizer, self.config, self.generator, self.n_updates, run_dir,
            progress_bar,
        )
        self.n_updates = int(lines[-1]["train/n_updates"])
        return lines

    def evaluate(self, responses: Responses) -> dict[str, float]:
        """``sft/loss`` of other responses, the mean over their tokens."""
        tokens, total = 0, 0.0
        with training.single_thread(), torch.no_grad():
            for part in training.minibatches(responses, self.config.batch_size, None):
                tokens += int(part.lengths.sum())
                total -= float(answer_log_probs(self.policy, part).sum())
        return {"sft/loss": total / max(tokens, 1)}
