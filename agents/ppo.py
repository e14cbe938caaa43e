"""Proximal policy optimisation, with an optional KL penalty to a reference policy.

    rollout --> (KL in the reward) --> GAE --> n_epochs x minibatches of the clipped loss

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); defaults and the meaning
of every shared field are those of Stable-Baselines3. The KL penalty is that of Ziegler et al.,
"Fine-Tuning Language Models from Human Preferences" (2019). Advantages are normalised per minibatch
with the sample deviation, as Stable-Baselines3 does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch

from agents import on_policy, training
from agents.advantages import gae, kl_in_reward, whiten
from agents.batch import Batch, LossTerms, evaluate, make_batch
from agents.kl import ESTIMATORS
from agents.losses import clip_fraction, clipped_loss, masked_mean, value_loss
from agents.policies.base import Evaluation, Policy
from agents.rollout import Rollout
from agents.schedules import schedule


@dataclass(frozen=True)
class PPOConfig:
    """Fields as in Stable-Baselines3, one for whole episodes, and four for the reference policy.

    ====================  ==========================================================================
    learning_rate         Adam's step size; a number or "lin_0.0003"
    n_steps               vector steps per rollout (times the number of environments = samples)
    n_episodes            None: rollouts of n_steps. A number: rollouts of that many whole episodes of
                          each environment instead; a policy that reads sequences always collects whole
                          episodes (one, if None)
    batch_size            samples per minibatch; the last one of an epoch may be smaller. A sample is a
                          step, or a whole episode if the policy reads sequences
    n_epochs              passes over each rollout
    gamma, gae_lambda     discount per step, and GAE's lambda
    clip_range            clip of the probability ratio, a number or schedule; None does not clip
    clip_range_vf         clip of the value round its stored old one, in value units; None: off
    normalize_advantage   whiten advantages within each minibatch
    ent_coef, vf_coef     factors of the entropy bonus and of the squared value error
    max_grad_norm         the gradient is scaled down to this norm; None: off
    target_kl             stop an update once its approximate KL exceeds 1.5 times this; None: off
    beta                  factor of the KL to the reference policy; 0: none
    kl_in                 "reward": -beta * k1 per step, its optimum is the closed form
                          ref * exp(r / beta); "loss": beta * kl_estimator of the sampled actions. In
                          the loss, normalize_advantage divides the reward and not the KL, so beta
                          then weighs against rewards of deviation 1: turn it off for that optimum
    kl_estimator          "k1", "k2" or "k3", for kl_in="loss" (see agents.kl: k2 has the gradient of
                          the KL objective on-policy, k3 another fixed point, k1 no expected gradient)
    policy                "auto", "table", "mlp" (see agents.policies) or a Policy
    policy_kwargs         arguments of that policy, such as {"net_arch": [64, 64]}
    ====================  ==========================================================================
    """

    learning_rate: float | str = 3e-4
    n_steps: int = 2048
    n_episodes: int | None = None
    batch_size: int = 64
    n_epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float | str | None = 0.2
    clip_range_vf: float | None = None
    normalize_advantage: bool = True
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float | None = 0.5
    target_kl: float | None = None
    beta: float = 0.0
    kl_in: str = "reward"
    kl_estimator: str = "k2"
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(
            self, n_steps="integer >= 1", n_episodes="integer >= 1", batch_size="integer >= 1",
            n_epochs="integer >= 1", gamma="in [0, 1]", gae_lambda="in [0, 1]", clip_range_vf="> 0",
            ent_coef=">= 0", vf_coef=">= 0", max_grad_norm="> 0", target_kl="> 0", beta=">= 0",
        )
        schedule(self.learning_rate, "learning_rate")
        if self.clip_range is not None:
            schedule(self.clip_range, "clip_range")
        training.check_choice("kl_in", self.kl_in, ("reward", "loss"))
        training.check_choice("kl_estimator", self.kl_estimator, tuple(ESTIMATORS))


def ppo_loss(evaluation: Evaluation, batch: Batch, config: PPOConfig, clip: float | None) -> LossTerms:
    """``clipped loss + vf_coef * (V - R)^2 - ent_coef * entropy (+ beta * KL)``, means over samples.

    Args:
        evaluation: the current policy on the batch, with gradient.
        clip: clip range of this update; None does not clip.
    """
    surrogate = clipped_loss(evaluation.log_prob, batch.old_log_probs, batch.advantages, clip)
    mask = batch.mask
    policy = masked_mean(surrogate.loss, mask)
    # vf_coef multiplies the squared error, as in Stable-Baselines3; value_loss is half of that.
    value = 2.0 * masked_mean(
        value_loss(evaluation.value, batch.returns, batch.old_values, config.clip_range_vf), mask
    )
    entropy = masked_mean(evaluation.entropy, mask)
    total = policy + config.vf_coef * value
    if config.ent_coef > 0:  # a term with factor 0 would still cost its backward pass
        total = total - config.ent_coef * entropy
    kl = torch.zeros(())
    if config.beta > 0 and config.kl_in == "loss":
        assert batch.ref_log_probs is not None
        kl = masked_mean(ESTIMATORS[config.kl_estimator](evaluation.log_prob, batch.ref_log_probs), mask)
        total = total + config.beta * kl
    return LossTerms(total, policy, value, entropy, kl, batch.steps(surrogate.ratio))


class PPO:
    """PPO on any Env or VectorEnv with Box, Discrete or MultiBinary observations.

    Args:
        env: a Gymnasium Env or VectorEnv.
        seed: seeds weights, action sampling, minibatches and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
        config: fields of `PPOConfig`.
    """

    algorithm = "ppo"

    learn = on_policy.learn
    predict = on_policy.predict
    action_probabilities = on_policy.action_probabilities
    save = on_policy.save
    load = classmethod(on_policy.load)

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(PPOConfig, config)
        parts = on_policy.build(self.config, env, seed, reference)
        self.env, self.generator, self.policy, self.optimizer, self.reference, self.collector = parts
        self.num_timesteps = self.n_updates = 0

    def collect(self) -> Rollout:
        """The next ``n_steps`` vector steps of experience, or whole episodes (see `PPOConfig`)."""
        if self.config.n_episodes is not None or self.collector.sequences:
            return self.collector.collect_episodes(self.config.n_episodes or 1)
        rollout = self.collector.collect(self.config.n_steps)
        while not rollout.n_steps:  # nothing but reset steps: short episodes and n_steps=1
            rollout = self.collector.collect(self.config.n_steps)
        return rollout

    def prepare(self, rollout: Rollout) -> Batch:
        """Rewards (less the KL penalty, if it is there) to advantages and returns."""
        cfg = self.config
        training.refuse_stale(rollout, self.collector)
        rewards = rollout.rewards
        if cfg.beta > 0:
            ref_log_probs = training.reference_log_probs(rollout, cfg.beta)
            if cfg.kl_in == "reward":
                rewards = kl_in_reward(rewards, rollout.log_probs, ref_log_probs, cfg.beta)
        advantages = gae(
            rewards, rollout.values, rollout.next_values, rollout.terminated, rollout.truncated,
            cfg.gamma, cfg.gae_lambda, rollout.mask,
        )
        return make_batch(rollout, advantages, advantages + rollout.values)

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> LossTerms:
        """`ppo_loss` of the current policy on a batch, with the clip range of that progress."""
        evaluation = evaluate(self.policy, batch)
        return ppo_loss(evaluation, batch, self.config, self.clip_range(progress_remaining))

    def clip_range(self, progress_remaining: float) -> float | None:
        """The clip range at that progress; None does not clip."""
        value = self.config.clip_range
        return None if value is None else schedule(value)(progress_remaining)

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """The minibatches of an update: n_epochs times every sample once, shuffled each time.

        Advantages are whitened within each minibatch.
        """
        cfg = self.config
        if len(batch) <= cfg.batch_size:
            # Means over all samples do not depend on their order: each epoch is the same minibatch.
            yield from repeat(self._whitened(batch), cfg.n_epochs)
            return
        for _ in range(cfg.n_epochs):
            for part in training.minibatches(batch, cfg.batch_size, self.generator):
                yield self._whitened(part)

    def _whitened(self, batch: Batch) -> Batch:
        # A single step has no deviation: it keeps its advantage, as in Stable-Baselines3.
        if not self.config.normalize_advantage or batch.steps(batch.advantages).numel() == 1:
            return batch
        return replace(batch, advantages=whiten(batch.advantages, batch.mask, ddof=1))

    def update(self, rollout: Rollout, progress_remaining: float = 1.0) -> dict[str, float]:
        """One PPO update: n_epochs over the rollout in minibatches. Returns its metrics."""
        cfg = self.config
        batch = self.prepare(rollout)
        learning_rate = schedule(cfg.learning_rate)(progress_remaining)
        clip = self.clip_range(progress_remaining)
        training.set_learning_rate(self.optimizer, learning_rate)

        history: list[LossTerms] = []
        grad_norms: list[float] = []
        stopped = False
        for part in self.minibatches(batch):
            terms = self.loss(part, progress_remaining)
            if cfg.target_kl is not None and training.approx_kl(terms.ratio) > 1.5 * cfg.target_kl:
                stopped = True  # before the step, and no further epoch follows
                break
            grad_norms.append(training.gradient_step(terms.total, self.optimizer, cfg.max_grad_norm))
            history.append(terms.detach())
        self.n_updates += len(history)
        self.collector.policy_version += 1

        metrics = training.mean_terms(history) | training.kl_ref(batch)
        ratio = torch.cat([terms.ratio for terms in history])
        return metrics | training.rollout_metrics(self.collector) | {
            "time/total_timesteps": self.num_timesteps,
            "train/learning_rate": learning_rate,
            "train/clip_range": float("nan") if clip is None else clip,
            "train/clip_fraction": 0.0 if clip is None else clip_fraction(ratio, clip).mean().item(),
            "train/n_updates": self.n_updates,
            "train/grad_norm": float(np.mean(grad_norms)),
            "train/explained_variance": training.explained_variance(batch),
            "train/early_stop": float(stopped),
        }
