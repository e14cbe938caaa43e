"""Proximal policy optimisation, with an optional KL penalty to a reference policy.

    rollout --> (KL in the reward) --> GAE --> n_epochs x minibatches of the clipped loss

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); defaults and the meaning
of every shared field are those of Stable-Baselines3. The KL penalty is that of Ziegler et al.,
"Fine-Tuning Language Models from Human Preferences" (2019). Advantages are normalised per minibatch
with the sample deviation, as Stable-Baselines3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents import checkpoint, training
from agents.advantages import gae, kl_in_reward, whiten
from agents.agent import as_vector_env, policy_probabilities, predict_actions
from agents.batch import Batch, LossTerms, make_batch
from agents.collector import Collector
from agents.kl import ESTIMATORS, k3
from agents.losses import clip_fraction, clipped_loss, masked_mean, value_loss
from agents.policies.base import Evaluation, Policy
from agents.rollout import Rollout
from agents.schedules import schedule
from agents.training_run import TrainingRun


@dataclass(frozen=True)
class PPOConfig:
    """Fields as in Stable-Baselines3, and four for the reference policy.

    ====================  ==========================================================================
    learning_rate         Adam's step size; a number or "lin_0.0003"
    n_steps               vector steps per rollout (times the number of environments = samples)
    batch_size            samples per minibatch; the last one of an epoch may be smaller
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
            self, n_steps="integer >= 1", batch_size="integer >= 1", n_epochs="integer >= 1",
            gamma="in [0, 1]", gae_lambda="in [0, 1]", clip_range_vf="> 0", ent_coef=">= 0", vf_coef=">= 0",
            max_grad_norm="> 0", target_kl="> 0", beta=">= 0",
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
    policy = masked_mean(surrogate.loss)
    # vf_coef multiplies the squared error, as in Stable-Baselines3; value_loss is half of that.
    value = 2.0 * masked_mean(
        value_loss(evaluation.value, batch.returns, batch.old_values, config.clip_range_vf)
    )
    entropy = masked_mean(evaluation.entropy)
    total = policy + config.vf_coef * value
    if config.ent_coef > 0:  # a term with factor 0 would still cost its backward pass
        total = total - config.ent_coef * entropy
    kl = torch.zeros(())
    if config.beta > 0 and config.kl_in == "loss":
        assert batch.ref_log_probs is not None
        kl = masked_mean(ESTIMATORS[config.kl_estimator](evaluation.log_prob, batch.ref_log_probs))
        total = total + config.beta * kl
    return LossTerms(total, policy, value, entropy, kl, surrogate.ratio)


class PPO:
    """PPO on any Env or VectorEnv with Box, Discrete or MultiBinary observations.

    Args:
        env: a Gymnasium Env or VectorEnv.
        seed: seeds weights, action sampling, minibatches and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
        config: fields of `PPOConfig`.
    """

    algorithm = "ppo"

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(PPOConfig, config)
        self.env = as_vector_env(env)
        self.generator = training.make_generator(seed)
        self.policy = training.build_policy(
            self.config.policy, self.env, self.generator, self.config.policy_kwargs
        )
        self.optimizer = training.FlatAdam(self.policy)
        self.reference = training.frozen(reference)
        self.collector = Collector(self.env, self.policy, self.generator, seed, self.reference)
        self.num_timesteps = 0
        self.n_updates = 0

    def learn(
        self,
        total_timesteps: int,
        run_dir: str | Path | None = None,
        progress_bar: bool = False,
        callback: Callable[[PPO], bool | None] | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
    ) -> PPO:
        """Train for at least ``total_timesteps`` more environment steps.

        Args:
            run_dir: folder for metrics.jsonl and TensorBoard events.
            callback: called after every iteration; returning False ends training.
            checkpoint_every: environment steps between two checkpoints in ``run_dir``; None: none.
            resume: go on from the newest checkpoint of ``run_dir``, to the numbers of a run that never
                stopped (see `agents.training_run`); agent and environment must be freshly made.
        """
        run = TrainingRun(self, total_timesteps, run_dir, progress_bar, checkpoint_every, resume)
        with training.single_thread(), run:
            while run.steps_left > 0:
                rollout = self.collect()
                self.num_timesteps += rollout.env_steps
                metrics = self.update(rollout, run.progress_remaining)
                run.record(metrics)
                if callback is not None and callback(self) is False:
                    break
        return self

    def collect(self) -> Rollout:
        """The next ``n_steps`` vector steps of experience, in which some action is executed."""
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
        evaluation = self.policy.evaluate(batch.observations, batch.actions)
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
        # A single sample has no deviation: it keeps its advantage, as in Stable-Baselines3.
        if not self.config.normalize_advantage or len(batch) == 1:
            return batch
        return replace(batch, advantages=whiten(batch.advantages, ddof=1))

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
            if cfg.target_kl is not None and approx_kl(terms.ratio) > 1.5 * cfg.target_kl:
                stopped = True  # before the step, and no further epoch follows
                break
            grad_norms.append(training.gradient_step(terms.total, self.optimizer, cfg.max_grad_norm))
            history.append(terms.detach())
        self.n_updates += len(history)
        self.collector.policy_version += 1

        metrics = update_metrics(history, clip)
        if batch.ref_log_probs is not None:
            metrics["train/kl_ref"] = float((batch.old_log_probs - batch.ref_log_probs).mean())
        return metrics | training.rollout_metrics(self.collector) | {
            "time/total_timesteps": self.num_timesteps,
            "train/learning_rate": learning_rate,
            "train/clip_range": float("nan") if clip is None else clip,
            "train/n_updates": self.n_updates,
            "train/grad_norm": float(np.mean(grad_norms)),
            "train/explained_variance": training.explained_variance(batch.old_values, batch.returns),
            "train/early_stop": float(stopped),
        }

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """Actions for one observation or a batch; the state is None (these policies have none)."""
        action = predict_actions(self.policy, self.env, observation, self.generator, deterministic)
        return action, None

    def action_probabilities(self, observations: Any) -> np.ndarray:
        """pi(.|s) for Discrete actions, [N, A]."""
        return policy_probabilities(self.policy, self.env, observations)

    def save(self, path: str | Path) -> None:
        """Write configuration, weights, optimiser and random state to one file, atomically."""
        checkpoint.save_agent(path, self)

    @classmethod
    def load(
        cls, path: str | Path, env: Any, reference: Policy | None = None, policy: Policy | None = None
    ) -> PPO:
        """An agent from `save`'s file. ``reference`` and a ``policy`` given as objects are given again."""
        return checkpoint.load_agent(path, cls, env, reference, policy)


def approx_kl(ratio: torch.Tensor) -> float:
    """KL(old policy || current policy), estimator k3, of samples from the old one; ratio [B]."""
    log_ratio = torch.log(ratio.detach())
    return k3(torch.zeros_like(log_ratio), log_ratio).mean().item()


def update_metrics(history: list[LossTerms], clip: float | None) -> dict[str, float]:
    """Means over all samples of an update, each minibatch weighted by its size."""
    ratio = torch.cat([terms.ratio for terms in history])
    sizes = torch.tensor([float(len(terms.ratio)) for terms in history])
    names = ("loss", "policy_gradient_loss", "value_loss", "entropy", "kl_loss")
    values = torch.stack([torch.stack(terms[: len(names)]) for terms in history])  # [minibatches, 5]
    means = (sizes @ values / sizes.sum()).tolist()
    return {
        **{f"train/{name}": mean for name, mean in zip(names, means, strict=True)},
        "train/approx_kl": approx_kl(ratio),
        "train/clip_fraction": 0.0 if clip is None else clip_fraction(ratio, clip).mean().item(),
    }
