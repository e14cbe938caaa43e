"""What the algorithm files share: configuration checks, minibatches, one thread.

Functions, not a base class: an algorithm calls what it needs and stays readable by itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from agents.batch import Batch, LossTerms
from agents.collector import Collector
from agents.kl import k3
from agents.policies.base import POLICIES, Policy, make_policy
from agents.rollout import Rollout
from agents.schedules import schedule
from llmgym.checks import did_you_mean

C = TypeVar("C")


class Data(Protocol):
    """Rows that can be counted and selected, such as a `Batch`, `Responses` or `Preferences`."""

    def __len__(self) -> int: ...

    def select(self, index: Tensor) -> Any: ...


D = TypeVar("D", bound=Data)


def check_fields(config: Any, **allowed: str) -> None:
    """Check numbers of a configuration: ``check_fields(cfg, beta=">= 0", gamma="in [0, 1]")``.

    Fields that are None pass (their meaning is "off"). A field must be finite, and an integer where the
    rule begins with "integer": ``check_fields(cfg, n_steps="integer >= 1")``.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    for name, rule in allowed.items():
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ValueError(f"{name}={value!r} must be a number {rule}")
        if rule.startswith("integer") and not isinstance(value, int):
            raise ValueError(f"{name}={value!r} must be {rule}")
        relation, _, bound = rule.removeprefix("integer ").partition(" ")
        good = {
            ">=": lambda v, b: v >= float(b),
            ">": lambda v, b: v > float(b),
            "in": lambda v, b: 0.0 <= v <= 1.0,
        }[relation](value, bound)
        if not good:
            raise ValueError(f"{name}={value!r} must be {rule}")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ValueError, naming the field and the nearest allowed value, unless value is allowed."""
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}{hint}")


def make_config(kind: type[C], given: dict[str, Any]) -> C:
    """A configuration from keyword arguments.

    Raises:
        TypeError: a name is not a field; names the nearest one and lists all.
        ValueError: from the configuration's own checks.
    """
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names)
            raise TypeError(f"{kind.__name__} has no field {name!r}{hint} Fields: {', '.join(names)}")
    # NumPy's numbers, as a sweep over linspace has them, would not be read back from a saved agent.
    return kind(**{k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()})


def make_generator(seed: int | None) -> torch.Generator:
    """A generator of its own, so that an agent neither reads nor moves torch's global one."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def build_policy(policy: str | Policy, env: VectorEnv, generator: torch.Generator, kwargs: Any) -> Any:
    """A policy by name, or the given one as it is, in evaluation mode.

    Dropout would give every forward another policy: the ratio of an untrained one would not be 1.
    """
    if isinstance(policy, str):
        return make_policy(policy, env, generator, **(kwargs or {}))
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy is a {type(policy).__name__}; allowed: {', '.join(map(repr, POLICIES))}, or an object "
            "with the methods of agents.policies.Policy"
        )
    if isinstance(policy, nn.Module):
        policy.eval()
    return policy


def frozen(reference: Policy | None) -> Policy | None:
    """A copy of the reference that no training can move."""
    copied = copy.deepcopy(reference)
    if isinstance(copied, nn.Module):
        copied.eval()
    return copied


def reference_log_probs(rollout: Rollout, beta: float) -> Tensor:
    """The rollout's reference log-probs, [T, N].

    Raises:
        ValueError: nobody knows the reference.
    """
    if rollout.ref_log_probs is None:
        raise ValueError(
            f"beta={beta} asks for the KL to a reference policy, but there is none: the environment "
            "gives no info['ref_logp'] at each step; pass reference=<policy>, or beta=0"
        )
    return rollout.ref_log_probs


def refuse_stale(rollout: Rollout, collector: Collector) -> None:
    """Raise ValueError if the rollout was sampled by an earlier version of the policy."""
    if rollout.policy_version != collector.policy_version:
        raise ValueError(
            f"the rollout was sampled by policy version {rollout.policy_version}, the policy is at "
            f"version {collector.policy_version}; collect again after every update"
        )


def minibatches(data: D, batch_size: int, generator: torch.Generator | None) -> Iterator[D]:
    """Parts that hold each sample once, shuffled; the last one may be short. In order without a generator.

    A part that holds all samples is not shuffled: means over it do not depend on the order.
    """
    if len(data) <= batch_size:
        yield data
        return
    order = torch.arange(len(data)) if generator is None else torch.randperm(len(data), generator=generator)
    for index in order.split(batch_size):
        yield data.select(index)


def rollout_metrics(collector: Collector) -> dict[str, float]:
    """Means over the last 100 episodes; NaN before the first has ended."""
    if not collector.recent_returns:
        return {"rollout/ep_rew_mean": float("nan"), "rollout/ep_len_mean": float("nan")}
    return {
        "rollout/ep_rew_mean": float(np.mean(collector.recent_returns)),
        "rollout/ep_len_mean": float(np.mean(collector.recent_lengths)),
    }


def kl_ref(batch: Batch) -> dict[str, float]:
    """KL(policy || reference) per step of a batch, as its metric; nothing without a reference."""
    if batch.ref_log_probs is None:
        return {}
    return {"train/kl_ref": float(batch.steps(batch.old_log_probs - batch.ref_log_probs).mean())}


def mean_terms(history: list[LossTerms]) -> dict[str, float]:
    """Loss terms over all samples of an update, each minibatch weighted by its size, as metrics."""
    ratio = torch.cat([terms.ratio for terms in history])
    sizes = torch.tensor([float(len(terms.ratio)) for terms in history])
    names = ("loss", "policy_gradient_loss", "value_loss", "entropy", "kl_loss")
    values = torch.stack([torch.stack(terms[: len(names)]) for terms in history])  # [minibatches, 5]
    means = (sizes @ values / sizes.sum()).tolist()
    metrics = {f"train/{name}": mean for name, mean in zip(names, means, strict=True)}
    return metrics | {"train/approx_kl": approx_kl(ratio)}


def one_step(agent: Any, batch: Batch, progress_remaining: float) -> tuple[LossTerms, dict[str, float]]:
    """One gradient step of ``agent.loss`` on all of a batch: the terms of its loss, and its metrics."""
    learning_rate = schedule(agent.config.learning_rate)(progress_remaining)
    set_learning_rate(agent.optimizer, learning_rate)
    terms = agent.loss(batch, progress_remaining)
    grad_norm = gradient_step(terms.total, agent.optimizer, agent.config.max_grad_norm)
    agent.n_updates += 1
    agent.collector.policy_version += 1
    return terms.detach(), kl_ref(batch) | rollout_metrics(agent.collector) | {
        "time/total_timesteps": agent.num_timesteps,
        "train/loss": terms.total.item(),
        "train/policy_gradient_loss": terms.policy.item(),
        "train/entropy": terms.entropy.item(),
        "train/grad_norm": grad_norm,
        "train/learning_rate": learning_rate,
        "train/n_updates": agent.n_updates,
    }


def approx_kl(ratio: Tensor) -> float:
    """KL(old policy || current policy), estimator k3, of samples from the old one; ratio [B]."""
    log_ratio = torch.log(ratio.detach())
    return k3(torch.zeros_like(log_ratio), log_ratio).mean().item()


def explained_variance(batch: Batch) -> float:
    """``1 - Var[returns - values] / Var[returns]``; NaN where the returns do not vary."""
    returns, values = batch.steps(batch.returns), batch.steps(batch.old_values)
    variance = returns.var(correction=0)
    if variance == 0:
        return float("nan")
    return float(1.0 - (returns - values).var(correction=0) / variance)


class FlatAdam(torch.optim.Adam):
    """Adam on all parameters of a module as one vector.

    The parameters become views of the vector, so that one call updates and one call clips all of them:
    for small networks an optimiser's time is the number of its calls. Epsilon is Stable-Baselines3's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.views = [p for p in module.parameters() if p.requires_grad]
        flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in self.views]))
        sizes = [p.numel() for p in self.views]
        for view, part in zip(self.views, flat.detach().split(sizes), strict=True):
            view.data = part.view_as(view)
        super().__init__([flat], eps=1e-5, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the step size of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def gradient_step(loss: Tensor, optimizer: FlatAdam, max_norm: float | None) -> float:
    """One optimiser step down the loss, the gradient scaled to at most ``max_norm``; returns its norm.

    Raises:
        FloatingPointError: the gradient is not finite; the weights are left as they were.
    """
    flat: Tensor = optimizer.param_groups[0]["params"][0]
    if optimizer.views[0].data_ptr() != flat.data_ptr():
        raise RuntimeError(
            "the policy's parameters were replaced after its optimiser was made (by .to() or .double()?); "
            "convert the policy first and pass it as policy="
        )
    gradients = torch.autograd.grad(loss, optimizer.views, materialize_grads=True)
    gradient = torch.cat([g.reshape(-1) for g in gradients])
    norm = float(torch.linalg.vector_norm(gradient))
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the gradient's norm is {norm} at loss {loss.item()}; lower learning_rate or "
            "max_grad_norm, or look for extreme rewards"
        )
    if max_norm is not None and norm > max_norm:
        gradient *= max_norm / norm
    flat.grad = gradient
    optimizer.step()
    return norm


@contextmanager
def single_thread() -> Iterator[None]:
    """Run with one torch thread: small networks are slower with more (measured up to 16 times)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
