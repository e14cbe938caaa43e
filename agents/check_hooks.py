"""Checks for agents with the hooks of `agents.checking`: data, updates, references and resuming."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from agents.check_tools import (
    RATIO_TOLERANCE,
    CheckSkipped,
    Subject,
    VectorProbe,
    fail,
    load_like,
    trainable,
)
from agents.policies.base import reads_sequences
from llmgym import AnswerPool

MAX_UPDATES = 3  # a head that starts at zero keeps the layers below it still for the first one


def first_ratio(subject: Subject) -> str | None:
    """Before the first update the probability ratio is 1 everywhere, so nothing is clipped."""
    agent, _, batch = subject.experienced()
    ratio = agent.loss(batch, 1.0).ratio.detach()
    tolerance = RATIO_TOLERANCE[ratio.dtype]
    outside = float((~((ratio - 1.0).abs() <= tolerance)).double().mean())
    if outside > 0:
        fail(f"before the first update the ratio runs from {float(ratio.min()):.6g} to "
             f"{float(ratio.max()):.6g}; a share of {outside:.2g} is further than {tolerance} from 1",
             f"ratio 1 and clip fraction 0 ({ratio.dtype}: within {tolerance})",
             "sampling with temperature T but scoring without", "dropout on while collecting",
             "log-probs of clipped, squashed or re-tokenised actions",
             "batch statistics (BatchNorm) that differ between one step and a batch")
    return f"max |ratio - 1| = {float((ratio - 1.0).abs().max()):.2g}"


def sampling(subject: Subject) -> str | None:
    """Actions are drawn from the distribution whose log-probs are recorded.

    Then the mean of ``-log_prob - entropy`` is zero within its standard error, whatever the policy.
    Checked at perturbed weights, since all temperatures of a uniform policy are the same.
    """
    agent = subject.fresh()
    generator = torch.Generator().manual_seed(subject.seed)
    with torch.no_grad():
        for p in trainable(agent).values():
            p.add_(0.2 * torch.randn(p.shape, generator=generator).to(p.dtype))
    surprises, entropies, n = [], 0.0, 0
    while n < 2_500:
        batch = agent.prepare(agent.collect())
        steps = executed(batch, batch.old_log_probs)
        surprises.append(-steps.double())
        entropies += float(agent.loss(batch, 1.0).entropy.detach()) * len(steps)
        n += len(steps)
    surprise = torch.cat(surprises)
    gap = float(surprise.mean()) - entropies / n
    # The spread of the entropies over states is in it too, so this error is rather too large.
    error = float(surprise.std()) / n**0.5
    if abs(gap) > max(5.0 * error, 0.01):
        fail(f"over {n:,} sampled actions the mean of -log_prob is {gap:+.3f} nats from the mean entropy "
             f"(standard error {error:.3f})",
             "equal means: the entropy is the expected -log_prob of what is sampled",
             "sampling with temperature T but scoring without",
             "top-k, top-p or epsilon-greedy while collecting",
             "log-probs of other actions than those executed", "an entropy that is not that of the policy")
    return f"mean of -log_prob minus entropy: {gap:+.4f} nats, standard error {error:.4f}, {n:,} actions"


def executed(batch: Any, x: Tensor) -> Tensor:
    """The steps of a batch that count: all, or those of its ``mask`` where a sample is an episode."""
    mask = getattr(batch, "mask", None)
    return x if mask is None else x[mask]


def reference_kl(subject: Subject) -> str | None:
    """A policy that starts at the reference has KL 0 to it, at every step of its first rollout."""
    pool = AnswerPool.random(3, 8, seed=0, ref_spread=1.0)
    agent = subject.agent(subject.environment(lambda: gym.make("AnswerPool-v0", pool=pool))[0])
    start = torch.as_tensor(agent.action_probabilities(list(range(pool.n_prompts)))).double()
    exact = float((start * (start.log() - torch.tensor(pool.ref_probs).log())).sum(-1).mean())
    if exact > 1e-5:
        raise CheckSkipped(f"the policy starts {exact:.3f} nats from the reference of AnswerPool-v0")
    batch = agent.prepare(agent.collect())
    reference = getattr(batch, "ref_log_probs", None)
    if reference is None:
        raise CheckSkipped("the batch has no ref_log_probs")
    kl = executed(batch, batch.old_log_probs - reference)
    if not float(kl.abs().max()) <= 1e-4:
        fail("the policy equals the reference, but log_prob - ref_log_prob runs from "
             f"{float(kl.min()):.3g} to {float(kl.max()):.3g} (mean {float(kl.mean()):.3g})",
             "0 at every step, within 1e-4",
             "reference log-probs of the previous or next step",
             "under same-step autoreset, the next episode's info read instead of final_info",
             "the reference scored at another temperature, or with dropout on")
    return f"max |log_prob - ref_log_prob| = {float(kl.abs().max()):.2g}"


def no_gradient_in_data(subject: Subject) -> str | None:
    """Old log-probs, values, advantages and returns are constants."""
    _, rollout, batch = subject.experienced()
    carrying = [
        f"{kind}.{name}"
        for kind, record in (("rollout", rollout), ("batch", batch))
        for name, value in vars(record).items()
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if carrying:
        fail(f"these carry gradient: {', '.join(carrying)}",
             "what was recorded, and targets made of it, are constants in the loss",
             "torch.no_grad() missing round collection",
             "advantages from the current values, without detach()")
    return None


def updated(subject: Subject) -> tuple[Any, Any, dict[str, Tensor]]:
    """An agent after one update, the batch of it, and the parameters before it."""
    agent, rollout, batch = subject.experienced()
    before = {name: p.detach().clone() for name, p in trainable(agent).items()}
    agent.update(rollout, 1.0)
    return agent, batch, before


def ratio_moves(subject: Subject) -> str | None:
    """After one update the policy is another, so the ratio on the same batch is no longer 1."""
    agent, batch, _ = updated(subject)
    distance = float((agent.loss(batch, 1.0).ratio.detach() - 1.0).abs().max())
    if not distance > 1e-7:
        fail(f"after one update max |ratio - 1| on the same batch is {distance:.2g}",
             "a ratio that has moved",
             "old log-probs computed anew in the loss, instead of those recorded",
             "the optimiser holds the parameters of another copy of the policy", "a learning rate of 0",
             "advantages that are all zero")
    return f"max |ratio - 1| = {distance:.2g}"


def weights_change(subject: Subject) -> str | None:
    """Every parameter that requires gradient moves within three updates.

    Except a critic that is not used: parameters of which neither the loss nor the policy's log-probs are
    a function, in an agent that reports no value loss. (Algorithms that compare whole episodes with each
    other train policies that have a critic without it.)
    """
    agent, batch, before = updated(subject)
    unused = unused_critic(agent, batch)
    still = [name for name in before if name not in unused]
    for attempt in range(MAX_UPDATES):
        if attempt:
            agent.update(agent.collect(), 1.0)
        now = trainable(agent)
        still = [name for name in still if torch.equal(now[name].detach(), before[name])]
        if not still:
            remark = f"; not used, and left out: {', '.join(sorted(unused))}" if unused else ""
            return f"{len(before) - len(unused)} parameters moved in {attempt + 1} update(s){remark}"
    fail(f"after {MAX_UPDATES} updates these parameters are as they were: {', '.join(still)}",
         "every parameter with requires_grad moves (a layer that is frozen on purpose sets it to False)",
         "a layer that the optimiser was not given, or made after it",
         "a detach() or no_grad() on the way to the loss",
         "a part of the policy that no term of the loss reads")


def unused_critic(agent: Any, batch: Any) -> set[str]:
    """Parameters that neither the loss nor the log-probs of the batch's actions depend on.

    Empty where the agent fits a critic (its loss has a term ``value`` that is not zero), or where the
    policy has no ``evaluate(observations, actions)`` with a ``log_prob`` that would tell.
    """
    evaluate = getattr(agent.policy, "evaluate", None)
    terms = agent.loss(batch, 1.0)
    if evaluate is None or bool(torch.as_tensor(getattr(terms, "value", 0.0)).detach().any()):
        return set()
    mask = None if reads_sequences(agent.policy) else getattr(batch, "mask", None)
    observations, actions = (x if mask is None else x[mask] for x in (batch.observations, batch.actions))
    parameters = trainable(agent)
    outputs = (terms.total, evaluate(observations, actions).log_prob.sum())
    grads = [torch.autograd.grad(x, list(parameters.values()), allow_unused=True) for x in outputs]
    return {
        name for name, *reached in zip(parameters, *grads, strict=True) if all(g is None for g in reached)
    }


def stale_rollout(subject: Subject) -> str | None:
    """A rollout that an earlier version of the policy sampled is refused."""
    agent, rollout, _ = subject.experienced()
    if not hasattr(rollout, "policy_version"):
        raise CheckSkipped("the rollout has no policy_version")
    agent.update(rollout, 1.0)
    try:
        agent.update(rollout, 1.0)
    except (ValueError, RuntimeError) as error:
        return f"refused: {type(error).__name__}"
    fail("a second update with the same rollout was accepted",
         "ValueError: the policy that sampled it is gone, so its log-probs and advantages are too old",
         "policy_version is not compared in prepare", "policy_version is not counted up by update")


def parameters_differ(one: Any, other: Any) -> list[str]:
    pairs = zip(one.policy.state_dict().items(), other.policy.state_dict().values(), strict=True)
    return [name for (name, a), b in pairs if not torch.equal(a, b)]


def training_after_load(subject: Subject) -> str | None:
    """Saved, loaded and trained on is the same as trained on, where the environment has no past.

    One prompt and one-step episodes: a fresh environment is in the state of a used one.
    """
    pool = AnswerPool.random(1, 8, seed=0)

    def environment() -> Any:
        if subject.n_envs == 1:
            return subject.environment(lambda: gym.make("AnswerPool-v0", pool=pool))[0]
        return VectorProbe(gym.make_vec("AnswerPool-v0", num_envs=subject.n_envs, pool=pool))

    agent = subject.agent(environment())
    agent.learn(256)
    path = subject.folder / "continued" / "agent"
    path.parent.mkdir(exist_ok=True)
    agent.save(path)
    loaded = load_like(agent, path, environment())
    agent.learn(256)
    loaded.learn(256)
    different = parameters_differ(agent, loaded)
    if different:
        fail(f"after load and learn, {', '.join(different)} differ from those of the agent that went on",
             "the same numbers",
             "the optimiser's state is not saved", "the random generator's state is not saved",
             "a counter that a schedule depends on starts again at 0", "the weights are not saved")
    return None


class Interrupted(Exception):
    """Raised in the middle of a run that is to be resumed."""


def resume(subject: Subject) -> str | None:
    """A run that was stopped and resumed from its last checkpoint ends like one that never stopped."""
    needed = ("run_dir", "checkpoint_every", "resume", "callback")
    missing = sorted(set(needed) - set(inspect.signature(subject.fresh().learn).parameters))
    if missing:
        raise CheckSkipped(f"learn() has no parameter {', '.join(missing)}")

    def train(name: str, total: int, **arguments: Any) -> Any:
        agent = subject.fresh()
        agent.learn(total, run_dir=subject.folder / name, checkpoint_every=1, **arguments)
        return agent

    total = train("one", 1).num_timesteps + 64  # one iteration, and something left for the next
    whole = train("whole", total)

    def stop(_agent: Any) -> None:
        raise Interrupted

    try:
        train("stopped", total, callback=stop)
    except Interrupted:
        pass
    else:
        fail("learn ended as usual, though its callback raised an error", "the error is passed on",
             "the callback is never called", "a broad `except` round the training loop")
    resumed = train("stopped", total, resume=True)
    different = parameters_differ(whole, resumed)
    if different or whole.num_timesteps != resumed.num_timesteps:
        fail(f"the resumed run ended after {resumed.num_timesteps:,} steps, the unbroken one after "
             f"{whole.num_timesteps:,}, and they differ in {', '.join(different) or 'no parameter'}",
             "the same numbers",
             "the optimiser's or a random generator's state is not in the checkpoint",
             "unfinished episodes start anew", "a schedule starts again at 1")
    return f"equal after {whole.num_timesteps:,} steps"


def one_task_per_group(subject: Subject) -> str | None:
    """All episodes of a group were given the same task."""
    _, rollout, _ = subject.experienced()
    episodes = getattr(rollout, "episodes", None)
    groups, tasks = getattr(episodes, "group_ids", None), getattr(episodes, "task_ids", None)
    if groups is None or tasks is None or not any(group >= 0 for group in groups):
        raise CheckSkipped("rollout.episodes has no group_ids and task_ids of grouped episodes")
    seen: dict[int, set[int]] = {}
    for group, task in zip(groups, tasks, strict=True):
        if group >= 0:
            seen.setdefault(int(group), set()).add(int(task))
    mixed = {group: sorted(of) for group, of in seen.items() if len(of) > 1}
    if mixed:
        group, of = next(iter(mixed.items()))
        fail(f"{len(mixed)} of {len(seen)} groups mix tasks; group {group} has tasks {of}",
             "one task per group: its baseline is the mean over answers to the same prompt",
             "reset without options={'task_id': ...}", "rows shuffled after groups were numbered",
             "an autoreset drew a new task inside the group")
    return f"{len(seen)} groups"
