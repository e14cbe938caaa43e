"""REINFORCE with a choice of baseline, and an optional KL penalty to a reference policy.

    whole episodes --> (KL in the reward) --> returns --> minus a baseline --> one gradient step

Source: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning" (1992); Sutton et al., "Policy Gradient Methods" (2000), for the sum of rewards to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents import checkpoint, training
from agents.advantages import discounted_returns, gae, kl_in_reward, whiten
from agents.agent import as_vector_env, policy_probabilities, predict_actions
from agents.batch import Batch, LossTerms, make_batch
from agents.collector import Collector
from agents.losses import masked_mean, policy_gradient_loss, value_loss
from agents.policies.base import Policy
from agents.rollout import Rollout
from agents.schedules import schedule
from agents.training_run import TrainingRun

BASELINES = ("none", "batch_mean", "value")


@dataclass(frozen=True)
class ReinforceConfig:
    """Fields as in `agents.ppo.PPOConfig` where the names are the same.

    ====================  ==========================================================================
    learning_rate         Adam's step size; a number or "lin_0.001"
    n_episodes            whole episodes of each environment per gradient step
    gamma                 discount per step
    baseline              what is subtracted from the returns: "none"; "batch_mean", the mean over the
                          steps of the batch, which includes the step itself and so shrinks the
                          expected gradient by 1 - 1/B; "value", a learned critic
    normalize_advantage   whiten advantages over the batch
    ent_coef, vf_coef     factors of the entropy bonus and of the squared value error
    max_grad_norm         the gradient is scaled down to this norm; None: off
    beta                  factor of the KL to the reference policy, in the reward per step (k1)
    policy, policy_kwargs as in PPO
    ====================  ==========================================================================
    """

    learning_rate: float | str = 1e-3
    n_episodes: int = 1
    gamma: float = 0.99
    baseline: str = "value"
    normalize_advantage: bool = False
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float | None = 0.5
    beta: float = 0.0
    policy: Any = "auto"
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        training.check_fields(
            self, n_episodes="integer >= 1", gamma="in [0, 1]", ent_coef=">= 0", vf_coef=">= 0",
            max_grad_norm="> 0", beta=">= 0",
        )
        training.check_choice("baseline", self.baseline, BASELINES)
        schedule(self.learning_rate, "learning_rate")


class Reinforce:
    """REINFORCE on any Env or VectorEnv with Box, Discrete or MultiBinary observations.

    Args:
        env: a Gymnasium Env or VectorEnv.
        seed: seeds weights, action sampling and the first reset (row i with seed + i).
        reference: policy for the KL; None reads ``info["ref_logp"]`` where the environment has it.
        config: fields of `ReinforceConfig`.
    """

    algorithm = "reinforce"

    def __init__(
        self, env: Any, seed: int | None = None, reference: Policy | None = None, **config: Any
    ) -> None:
        self.config = training.make_config(ReinforceConfig, config)
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
        callback: Callable[[Reinforce], bool | None] | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
    ) -> Reinforce:
        """Train for at least ``total_timesteps`` more environment steps, in whole episodes.

        A row of a vector environment that has its episodes goes on until the others have theirs. Those
        steps are not learned from but are counted (none in disabled autoreset mode, where it waits).

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
        """The next ``n_episodes`` whole episodes of each environment."""
        return self.collector.collect_episodes(self.config.n_episodes)

    def prepare(self, rollout: Rollout) -> Batch:
        """Rewards (less the KL penalty, if it is there) to returns, and those to advantages.

        With the critic as baseline a truncated episode bootstraps from its final observation; the
        other baselines have no value to bootstrap from, and its return ends with its last reward.
        """
        cfg = self.config
        training.refuse_stale(rollout, self.collector)
        rewards = rollout.rewards
        if cfg.beta > 0:
            ref_log_probs = training.reference_log_probs(rollout, cfg.beta)
            rewards = kl_in_reward(rewards, rollout.log_probs, ref_log_probs, cfg.beta)
        if cfg.baseline == "value":
            advantages = gae(
                rewards, rollout.values, rollout.next_values, rollout.terminated,
                rollout.truncated, cfg.gamma, 1.0, rollout.mask,
            )
            returns = advantages + rollout.values
        else:
            ends = rollout.terminated | rollout.truncated
            returns = discounted_returns(rewards, ends, cfg.gamma, rollout.mask)
            mean = masked_mean(returns, rollout.mask) if cfg.baseline == "batch_mean" else 0.0
            advantages = returns - mean
        batch = make_batch(rollout, advantages, returns)
        if cfg.normalize_advantage:
            batch.advantages = whiten(batch.advantages, ddof=1)
        return batch

    def loss(self, batch: Batch, progress_remaining: float = 1.0) -> LossTerms:
        """``policy gradient + vf_coef * (V - G)^2 - ent_coef * entropy``, means over samples."""
        cfg = self.config
        evaluation = self.policy.evaluate(batch.observations, batch.actions)
        policy = masked_mean(policy_gradient_loss(evaluation.log_prob, batch.advantages))
        entropy = masked_mean(evaluation.entropy)
        total = policy - cfg.ent_coef * entropy if cfg.ent_coef > 0 else policy
        value = torch.zeros(())
        if cfg.baseline == "value":
            # vf_coef multiplies the squared error, as in PPO; value_loss is half of that.
            value = 2.0 * masked_mean(value_loss(evaluation.value, batch.returns))
            total = total + cfg.vf_coef * value
        ratio = torch.exp(evaluation.log_prob - batch.old_log_probs).detach()
        return LossTerms(total, policy, value, entropy, torch.zeros(()), ratio)

    def update(self, rollout: Rollout, progress_remaining: float = 1.0) -> dict[str, float]:
        """One gradient step on the whole rollout. Returns its metrics."""
        cfg = self.config
        batch = self.prepare(rollout)
        learning_rate = schedule(cfg.learning_rate)(progress_remaining)
        training.set_learning_rate(self.optimizer, learning_rate)
        terms = self.loss(batch)
        grad_norm = training.gradient_step(terms.total, self.optimizer, cfg.max_grad_norm)
        self.n_updates += 1
        self.collector.policy_version += 1

        metrics = {
            "time/total_timesteps": self.num_timesteps,
            "train/loss": terms.total.item(),
            "train/policy_gradient_loss": terms.policy.item(),
            "train/entropy": terms.entropy.item(),
            "train/grad_norm": grad_norm,
            "train/learning_rate": learning_rate,
            "train/n_updates": self.n_updates,
        }
        if cfg.baseline == "value":
            metrics["train/value_loss"] = terms.value.item()
            metrics["train/explained_variance"] = training.explained_variance(
                batch.old_values, batch.returns
            )
        if batch.ref_log_probs is not None:
            metrics["train/kl_ref"] = float((batch.old_log_probs - batch.ref_log_probs).mean())
        return metrics | training.rollout_metrics(self.collector)

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
    ) -> Reinforce:
        """An agent from `save`'s file. ``reference`` and a ``policy`` given as objects are given again."""
        return checkpoint.load_agent(path, cls, env, reference, policy)
