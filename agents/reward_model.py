"""A reward model: scores of answers, learned from preferences between them.

    preferences --> Bradley-Terry loss on differences of scores --> scores of mean 0 and deviation 1

Sources: Stiennon et al., "Learning to summarize from human feedback" (2020), section 3.4 and appendix
B, for the loss, the first weights of the head, the normalisation, and a value function that starts
from the reward model.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agents import fitting, training
from agents.policies.gpt import GPT, GPTPolicy
from agents.policies.separate_critic import SeparateCritic
from agents.preference_losses import bradley_terry_loss, preference_accuracy
from agents.preferences import Preferences, Responses, full_sequences


class TableScore(nn.Module):
    """A score for each answer to each prompt, from 0: for discrete observations and one action.

    Args:
        n_observations, n_actions: number of prompts and of answers.
    """

    def __init__(self, n_observations: int, n_actions: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(n_observations, n_actions))

    def forward(self, responses: Responses) -> Tensor:
        """Scores [B]."""
        return self.table[responses.observations, responses.actions]


class SequenceScore(nn.Module):
    """A linear head on a language model's body, read at the last token of prompt and response.

    Args:
        body: copied, so that a policy that it comes from is not trained.
        generator: source of the head's first weights, of deviation ``1 / sqrt(width + 1)``.
    """

    def __init__(self, body: GPT, generator: torch.Generator) -> None:
        super().__init__()
        self.body = copy.deepcopy(body)
        self.weight = nn.Parameter(
            torch.randn(body.n_embd, generator=generator) / math.sqrt(body.n_embd + 1)
        )

    def forward(self, responses: Responses) -> Tensor:
        """Scores [B]."""
        return self.of_tokens(full_sequences(responses, self.body.pad))

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Scores [B] of prompts with their whole responses, int64 [B, L], padded behind."""
        return self.body.last_hidden(tokens) @ self.weight


class RewardModel(nn.Module):
    """``(score(answer) - mean) / deviation`` of a scoring module.

    There is no bias to learn: preferences only see differences. `normalise` fixes the scale that they
    leave open, too, so that a KL weight means the same for every reward model.

    Args:
        scorer: a module that takes `Responses` to scores [B], such as `TableScore` or `SequenceScore`.
    """

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        self.scorer = scorer
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("deviation", torch.tensor(1.0))

    def forward(self, responses: Responses) -> Tensor:
        """Scores [B], differentiable."""
        return (self.scorer(responses) - self.mean) / self.deviation

    def score(self, responses: Responses, batch_size: int = 256) -> Tensor:
        """Scores [B] without gradient, some rows at a time."""
        with training.single_thread(), torch.no_grad():
            return torch.cat([self(part) for part in training.minibatches(responses, batch_size, None)])

    def score_tokens(self, tokens: Tensor, batch_size: int = 256) -> Tensor:
        """`score` of token ids with the whole responses, int64 [B, L]; only with a `SequenceScore`."""
        with training.single_thread(), torch.no_grad():
            scores = torch.cat([self.scorer.of_tokens(part) for part in tokens.split(batch_size)])  # type: ignore[operator]
        return (scores - self.mean) / self.deviation

    def normalise(self, samples: Responses) -> None:
        """Shift and scale the scores to mean 0 and deviation 1 on samples of the reference policy.

        Raises:
            ValueError: the scores of the samples are not finite, or all the same.
        """
        raw = self.score(samples).double() * self.deviation + self.mean
        deviation = raw.std(correction=0)
        if not (bool(raw.isfinite().all()) and deviation > 0):
            raise ValueError(
                f"the scores of {len(samples)} samples lie from {raw.min()} to {raw.max()}; to normalise "
                "them they must be finite and differ: train the model first"
            )
        self.mean.copy_(raw.mean())
        self.deviation.copy_(deviation)


def reward_model_from(policy: GPTPolicy, seed: int | None = None) -> RewardModel:
    """A reward model for token sequences that starts from the body of a (fine-tuned) policy."""
    return RewardModel(SequenceScore(policy.body, training.make_generator(seed)))


def with_critic(policy: GPTPolicy, model: RewardModel) -> SeparateCritic:
    """The policy with a critic that starts as the reward model: V(tokens) is their normalised score.

    At the end of a response that is the reward; before it, what the reward model makes of its beginning.

    Raises:
        ValueError: the model does not score token sequences.
    """
    scorer = model.scorer
    if not isinstance(scorer, SequenceScore):
        raise ValueError(f"the model's scorer is a {type(scorer).__name__}; allowed: SequenceScore")
    return SeparateCritic(
        policy, scorer.body, scorer.weight / model.deviation, -model.mean / model.deviation
    )


@dataclass(frozen=True)
class RewardConfig:
    """Fields as in `agents.sft.SFTConfig`; a batch is a number of pairs."""

    learning_rate: float | str = 1e-3
    batch_size: int = 64
    n_epochs: int = 1
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        fitting.check_fit_config(self)


class RewardTrainer:
    """Trains a reward model, in place, to score the answers that were preferred above the others.

    Args:
        model: a `RewardModel`, or any module that takes `Responses` to scores [B].
        seed: of the order of the data.
        config: fields of `RewardConfig`.
    """

    def __init__(self, model: nn.Module, seed: int | None = None, **config: Any) -> None:
        self.config = training.make_config(RewardConfig, config)
        self.model = model
        self.generator = training.make_generator(seed)
        self.optimizer = training.FlatAdam(model)
        self.n_updates = 0

    def loss(self, preferences: Preferences) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean `bradley_terry_loss` over the pairs, and the metrics."""
        chosen, rejected = self.model(preferences.chosen), self.model(preferences.rejected)
        loss = bradley_terry_loss(chosen, rejected, preferences.margins, preferences.labels).mean()
        margin = (chosen - rejected).detach()
        return loss, {
            "rm/loss": loss.detach(),
            "rm/margin": margin.mean(),
            "rm/accuracy": preference_accuracy(margin, preferences.labels).mean(),
        }

    def fit(
        self, preferences: Preferences, run_dir: str | Path | None = None, progress_bar: bool = False
    ) -> list[dict[str, float]]:
        """Train on the pairs; returns the metrics (see `agents.fitting.fit`)."""
        lines = fitting.fit(
            preferences, self.loss, self.optimizer, self.config, self.generator, self.n_updates, run_dir,
            progress_bar,
        )
        self.n_updates = int(lines[-1]["train/n_updates"])
        return lines

    def evaluate(self, preferences: Preferences) -> dict[str, float]:
        """``rm/loss``, ``rm/margin`` and ``rm/accuracy`` on other pairs, such as held-out ones."""
        return fitting.evaluate(preferences, self.loss, self.config.batch_size)
