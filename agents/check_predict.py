"""Checks for any agent: what predict may depend on, and what it may touch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from agents.check_tools import (
    Subject,
    environment_states,
    fail,
    global_states,
    seed_globals,
    space_states,
    stack,
)


def deterministic(subject: Subject) -> str | None:
    """predict(deterministic=True) gives one action per observation, however often it is asked."""
    agent = subject.fresh()
    for observation in subject.observations():
        first, _ = agent.predict(observation, deterministic=True)
        kept = copy.deepcopy(first)
        for _ in range(3):
            again, _ = agent.predict(observation, deterministic=True)
            if not np.array_equal(kept, again):
                fail(f"two calls of predict(deterministic=True) gave {kept!r} and {again!r}",
                     "the same action for the same observation",
                     "`deterministic` is ignored", "dropout or noise is on in predict")
    return None


def environment_random_state(subject: Subject) -> str | None:
    """Neither building an agent nor predict touches the environment or its random state."""
    env, probes = subject.environment()
    env.reset(seed=subject.seed)

    def use() -> tuple[int, int]:
        return sum(len(p.actions) for p in probes), sum(p.n_resets for p in probes)

    # An agent may seed the action space that it samples from, so this one counts from here on only.
    states, used = environment_states(probes), use()
    agent = subject.agent(env)
    if environment_states(probes) != states or use() != used:
        fail(f"building the agent moved the environment's random state, or stepped or reset it "
             f"({use()[0] - used[0]} steps, {use()[1] - used[1]} resets)",
             "the environment as it was until learn is called",
             "a first reset in the constructor", "env.np_random used to initialise weights")
    spaces_before = space_states(env, probes)
    for observation in subject.observations():
        for deterministic in (True, False):
            agent.predict(observation, deterministic=deterministic)
    if use() != used:
        fail(f"predict made {use()[0] - used[0]} steps and {use()[1] - used[1]} resets of the environment",
             "predict reads its arguments and nothing else",
             "predict resets or steps the training environment")
    if environment_states(probes) != states or space_states(env, probes) != spaces_before:
        fail("predict moved the random state of the environment or of its action space",
             "predict leaves both as they are, so that looking at an agent does not change its training",
             "env.action_space.sample() or env.np_random used to sample actions",
             "predict seeds the environment")
    return None


def global_random_state(subject: Subject) -> str | None:
    """predict seeds no global generator (Python, numpy, torch), and if deterministic draws from none."""
    agent = subject.fresh()
    observations = subject.observations()
    before = global_states()
    for observation in observations:
        agent.predict(observation, deterministic=True)
    moved = [name for name, state in global_states().items() if state != before[name]]
    if moved:
        fail(f"predict(deterministic=True) moved the global generator of {', '.join(moved)}",
             "nothing is drawn, so that evaluating an agent does not change the run it is part of",
             "actions are sampled and then thrown away", "dropout is on", "predict sets a seed")
    ends = []
    for start in (1, 2):
        seed_globals(start)
        started = global_states()
        for observation in observations:
            agent.predict(observation, deterministic=False)
        ends.append((started, global_states()))
    (start_1, end_1), (_, end_2) = ends
    reseeded = [name for name in end_1 if end_1[name] == end_2[name]]
    if reseeded:
        fail(f"after predict the global generator of {', '.join(reseeded)} is in one state, wherever it was",
             "predict seeds nothing",
             "a call of random.seed, numpy.random.seed or torch.manual_seed inside predict")
    drawn = [name for name in end_1 if end_1[name] != start_1[name]]
    return f"if not deterministic, draws from the global generator of {', '.join(drawn)}" if drawn else None


def inputs_unchanged(subject: Subject) -> str | None:
    """predict writes neither into the observations it is given nor into actions it gave before."""
    env, probes = subject.environment()
    agent = subject.agent(env)
    observations = subject.observations()
    batch = stack(probes[0].observation_space, observations)
    given: list[Any] = list(observations)
    try:
        agent.predict(batch, deterministic=True)
        given.append(batch)
        note = None
    except Exception as error:  # batches are not required
        note = f"single observations only ({type(error).__name__} on a batch)"
    for deterministic in (True, False):
        previous: tuple[Any, Any] | None = None
        for observation in given:
            original = copy.deepcopy(observation)
            action, _ = agent.predict(observation, deterministic=deterministic)
            if not _equal(observation, original):
                fail("predict changed the observation it was given", "the array as it was",
                     "normalising or clipping in place (`x -= mean`, out=x) on the caller's array")
            if previous is not None and not _equal(*previous):
                fail(f"an action turned from {previous[1]!r} into {previous[0]!r} at the next predict",
                     "an array of its own for every call", "one buffer is reused for all results")
            previous = (action, copy.deepcopy(action))
    return note


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_equal(a[key], b[key]) for key in b)
    if isinstance(a, tuple):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(np.array_equal(a, b))


