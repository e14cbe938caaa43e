"""Direct preference optimisation: a policy from preferences, without a reward model and without sampling.

    preferences --> log-ratios of whole answers to a frozen reference --> loss of their difference

`DPO.fit` learns from preferences that are given. `DPO.learn` makes its own, so that DPO is an agent like
the others: pairs of answers sampled from the reference in the environment, and between the two of a pair
a preference drawn from their rewards. The policy itself is never sampled.

Sources: Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward
Model" (2023), and those of `agents.preference_losses`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents import fitting, groups, on_policy, training
from agents.batch import episode_batch
from agents.collector import Collector
from agents.policies.base import Policy
from agents.preference_losses import LOSS_TYPES, dpo_loss, preference_accuracy
from agents.preferences import Preferences, Responses, answer_log_probs, bradley_terry_preferences
from agents.rollout import Rollout
from agents.schedules import schedule


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
    n_epochs              passes over the data; of `learn`, over the pairs of one iteration
    n_pairs               pairs that an iteration of `learn` samples
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
    n_pairs: int = 256
    max_grad_norm: float | None = 1.0
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(self, beta="> 0", label_smoothing="in [0, 1]", n_pairs="integer >= 1")
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
    """DPO on any Env or VectorEnv; the two answers of a pair share a task where the environment has tasks.

    Args:
        env: a Gymnasium Env or VectorEnv; `fit` only needs its spaces.
        seed: seeds weights, the order of the data, action sampling and the first reset (row i with
            seed + i).
        reference: policy that the log-ratios are to, and that `learn` samples; None: the policy as it is
            before its first update.
        config: fields of `DPOConfig`.
    """

    algorithm = "dpo"

    learn = on_policy.learn
    predict = on_policy.predict
    action_probabilities = on_policy.action_probabilities
    save = on_policy.save
    load = classmethod(on_policy.load)

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(DPOConfig, config)
        parts = on_policy.build(self.config, env, seed, reference)
        self.env, self.generator, self.policy, self.optimizer, self.reference, _ = parts
        self.start = copy.deepcopy(self.policy)  # saved with the agent, see `agents.checkpoint`
        sampled = self.start if self.reference is None else self.reference
        self.collector = Collector(self.env, sampled, self.generator, seed)
        self.num_timesteps = self.n_updates = 0

    def frozen_reference(self) -> Policy:
        """The policy that the log-ratios are to."""
        if self.reference is not None:
            return self.reference
        if self.n_updates == 0:  # weights may have been loaded since the policy was made
            self.start.load_state_dict(self.policy.state_dict())
        return self.start

    def with_reference(self, preferences: Preferences) -> Pairs:
        """The preferences with the reference's log-probs, which do not change while the policy does."""
        reference = self.frozen_reference()
        with training.single_thread(), torch.no_grad():
            parts = [
                (answer_log_probs(reference, part.chosen), answer_log_probs(reference, part.rejected))
                for part in training.minibatches(preferences, 256, None)
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
            self.with_reference(preferences), self.loss, self.optimizer, self.config, self.generator,
            self.n_updates, run_dir, progress_bar,
        )
        self.n_updates = int(lines[-1]["train/n_updates"])
        return lines

    def evaluate(self, preferences: Preferences) -> dict[str, float]:
        """Loss, log-ratios, margin and accuracy on other pairs, such as held-out ones."""
        return fitting.evaluate(self.with_reference(preferences), self.loss, self.config.batch_size)

    def collect(self) -> Rollout:
        """``n_pairs`` pairs of episodes of the reference, each of one task."""
        self.frozen_reference()
        return groups.collect_groups(self.collector, self.config.n_pairs, 2)

    def label(self, rollout: Rollout) -> Preferences:
        """A preference for each pair of episodes, drawn by the Bradley-Terry model of their rewards."""
        nothing = torch.zeros_like(rollout.rewards)
        batch = episode_batch(rollout, nothing, nothing)
        answers = Responses(batch.observations, batch.actions, None if rollout.sequences else batch.mask)
        pairs = torch.argsort(groups.group_ids(rollout), stable=True).reshape(-1, 2)
        return bradley_terry_preferences(answers, rollout.episodes.returns, pairs, self.generator)

    def update(self, rollout: Rollout, progress_remaining: float = 1.0) -> dict[str, float]:
        """``n_epochs`` over the pairs of a rollout. Returns the metrics.

        There is no return among them: the episodes are the reference's.
        """
        cfg = self.config
        pairs = self.with_reference(self.label(rollout))
        learning_rate = schedule(cfg.learning_rate)(progress_remaining)
        training.set_learning_rate(self.optimizer, learning_rate)
        means = fitting.Means()
        for _ in range(cfg.n_epochs):
            for part in training.minibatches(pairs, cfg.batch_size, self.generator):
                fitting.step(part, self.loss, self.optimizer, cfg.max_grad_norm, means)
                self.n_updates += 1
        return means.result() | {
            "time/total_timesteps": self.num_timesteps,
            "train/learning_rate": learning_rate,
            "train/n_updates": self.n_updates,
        }
