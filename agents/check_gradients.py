"""Checks for agents with the hooks of `agents.checking`: what the gradient may depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agents.check_tools import CheckSkipped, Subject, fail, trainable

GRADIENT_TOLERANCE = 1e-4  # of the gradient's norm: float32 sums in another order
N_PADDING = 7  # steps of padding behind a rollout


def padding(subject: Subject) -> str | None:
    """Masked steps behind a rollout do not change the gradient."""
    agent, rollout, batch = subject.experienced()
    n_rows = max(N_PADDING, len(require_mask(rollout)) // 4)
    clean = gradient(agent, batch)  # first: an agent may remember something of the last prepare
    padded = gradient(agent, agent.prepare(with_padding(rollout, n_rows)))
    difference = relative_difference(clean, padded)
    if difference > GRADIENT_TOLERANCE:
        fail(f"{n_rows} masked steps behind the rollout change the gradient by {difference:.2g} of its norm",
             f"no change (at most {GRADIENT_TOLERANCE})",
             "the loss averaged over padding: .mean() instead of a sum over the mask divided by its count",
             "normalising over padding", "the last real step bootstraps from the padding")
    return f"relative change {difference:.2g}"


def masked_steps(subject: Subject) -> str | None:
    """What stands in masked steps is not read: other actions, rewards and values change nothing."""
    agent, rollout, _ = subject.experienced()
    padded = with_padding(rollout, N_PADDING)
    n_masked = int((~require_mask(padded).bool()).sum())
    clean = gradient(agent, agent.prepare(padded))
    garbled = gradient(agent, agent.prepare(with_garbage_where_masked(padded, subject.seed)))
    difference = relative_difference(clean, garbled)
    if not difference <= GRADIENT_TOLERANCE:
        fail(f"other content in {n_masked} masked steps changes the gradient by {difference:.2g} of its norm",
             f"no change (at most {GRADIENT_TOLERANCE})",
             "the critic is fitted to masked steps too", "an autoreset's reset step taken for a real one",
             "advantages accumulated across masked steps", "a masked value used for bootstrapping")
    return f"{n_masked} masked steps, relative change {difference:.2g}"


def minibatch_order(subject: Subject) -> str | None:
    """The gradient does not depend on the order of the samples."""
    agent, _, batch = subject.experienced()
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(subject.seed))
    difference = relative_difference(gradient(agent, batch), gradient(agent, batch.select(order)))
    if difference > GRADIENT_TOLERANCE:
        fail(f"batch.select(permutation) changes the gradient by {difference:.2g} of its norm",
             f"no change (at most {GRADIENT_TOLERANCE})",
             "one field of the batch shuffled apart from the others",
             "weights per position in the batch", "dropout or other noise in the loss")
    return f"relative change {difference:.2g}"


def accumulation(subject: Subject) -> str | None:
    """Gradients of parts, weighted by their sizes, add up to that of the whole."""
    agent, _, batch = subject.experienced()
    n = len(batch)
    if n < 3:
        raise CheckSkipped(f"the batch has {n} samples, too few to take apart")
    bounds = [0, max(1, n // 6), max(2, n // 2), n]  # unequal parts: a plain mean of them is wrong
    total = torch.zeros(())
    for start, end in zip(bounds, bounds[1:], strict=False):
        part = gradient(agent, batch.select(torch.arange(start, end)))
        total = total + (end - start) / n * part
    difference = relative_difference(gradient(agent, batch), total)
    if difference > GRADIENT_TOLERANCE:
        fail(f"the size-weighted sum over parts differs from the whole by {difference:.2g} of its norm",
             f"equality (at most {GRADIENT_TOLERANCE}): the loss is a mean over the samples it is given",
             "the loss of a minibatch divided by a fixed number, not by its size",
             "a mean of means over parts of different sizes",
             "normalising inside the loss (it belongs in prepare or minibatches)")
    return f"relative difference {difference:.2g}"


def minibatches(subject: Subject) -> str | None:
    """The minibatches of an update hold every sample equally often, its fields still together."""
    agent, _, batch = subject.experienced()
    n = len(batch)
    # A field that no minibatch computes with carries each sample's number through the shuffling.
    tagged = replace(batch, old_log_probs=torch.arange(n, dtype=torch.float64))
    counts = torch.zeros(n, dtype=torch.long)
    for part in agent.minibatches(tagged):
        index = part.old_log_probs.long()
        counts += torch.bincount(index, minlength=n)
        torn = [name for name, value in vars(part).items() if _torn(name, value, getattr(batch, name), index)]
        if torn:
            fail(f"in a minibatch of {len(index)} samples the {', '.join(torn)} belong to other samples than "
                 "old_log_probs",
                 "one permutation for all fields (advantages may be scaled and shifted)",
                 "one field shuffled apart, or not shuffled", "a field sorted or sliced by itself")
    if counts.min() != counts.max():
        fail(f"some samples come {int(counts.min())} times, others {int(counts.max())} times",
             "every sample equally often",
             "the last, short minibatch is dropped", "indices drawn with replacement")
    return f"{n:,} samples, each {int(counts[0])} times"


def _torn(name: str, value: Tensor | None, original: Tensor | None, index: Tensor) -> bool:
    if name == "old_log_probs" or value is None or original is None:
        return False
    expected = original[index]
    if name == "weights":  # a minibatch may divide by its own number of steps
        return not torch.equal(value > 0, expected > 0)
    if name != "advantages":
        return not torch.equal(value, expected)
    # Whitening is a straight line through (original, whitened) with a positive slope.
    expected, value = expected.double().flatten(), value.double().flatten()
    a, b = expected - expected.mean(), value - value.mean()
    size = float(a.norm() * b.norm())
    return size > 0 and float(a @ b) / size < 0.999


# --------------------------------------------------------------------------- gradients and altered rollouts


def gradient(agent: Any, batch: Any) -> Tensor:
    """The gradient of the loss on a batch with respect to all trainable parameters, flat float64."""
    parameters = list(trainable(agent).values())
    total = agent.loss(batch, 1.0).total
    # Retained: targets that wrongly carry gradient share a graph, and have a check of their own.
    grads = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    return torch.cat([g.detach().double().flatten() for g in parts])


def relative_difference(a: Tensor, b: Tensor) -> float:
    """``|a - b|`` in units of the larger norm.

    Raises:
        CheckSkipped: both are zero, so that their equality would say nothing.
    """
    size = max(float(a.norm()), float(b.norm()))
    if size == 0.0:
        raise CheckSkipped("the gradient of the loss is zero, there is nothing to compare")
    return float((a - b).norm()) / size


def require_mask(rollout: Any) -> Tensor:
    mask = getattr(rollout, "mask", None)
    if not isinstance(mask, Tensor) or not hasattr(rollout, "__dataclass_fields__"):
        raise CheckSkipped("the rollout is not a dataclass with a tensor field `mask`")
    return mask


def step_fields(rollout: Any) -> dict[str, Tensor]:
    """The fields of a rollout that have one entry per step, [T, N, ...]."""
    shape = require_mask(rollout).shape
    return {
        name: value
        for name, value in vars(rollout).items()
        if isinstance(value, Tensor) and value.shape[: len(shape)] == shape
    }


def with_padding(rollout: Any, n_rows: int) -> Any:
    """The rollout with ``n_rows`` masked steps behind it: copies of its last ones, reward 0, no ends."""
    padded = {}
    for name, value in step_fields(rollout).items():
        extra = value[-1:].expand(n_rows, *value.shape[1:]).clone()
        if name in ("rewards", "mask", "terminated", "truncated"):
            extra = torch.zeros_like(extra)
        elif name == "episode_index":
            extra = torch.full_like(extra, -1)
        padded[name] = torch.cat([value, extra])
    return replace(rollout, **padded)


def with_garbage_where_masked(rollout: Any, seed: int) -> Any:
    """The rollout with other observations, actions, rewards, values and log-probs where mask is 0.

    Floats become large random numbers, integers (which may be indices) those of other steps. The
    flags stay: a masked step has no end.
    """
    generator = torch.Generator().manual_seed(seed)
    masked = ~require_mask(rollout).bool()
    changed = {}
    for name, value in step_fields(rollout).items():
        if value.dtype == torch.bool or name == "episode_index":
            continue
        if value.is_floating_point():
            garbage = 100.0 * torch.randn(value.shape, generator=generator).to(value.dtype)
        else:
            steps = value.flatten(0, masked.dim() - 1)
            order = torch.randint(len(steps), (len(steps),), generator=generator)
            garbage = steps[order].view_as(value)
        where = masked.view(*masked.shape, *[1] * (value.dim() - masked.dim()))
        changed[name] = torch.where(where, garbage, value)
    return replace(rollout, **changed)
