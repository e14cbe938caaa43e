"""Checks for any agent: they use learn, predict, save and load, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from agents.check_tools import (
    Identity,
    Subject,
    fail,
    load_like,
    stack,
)

TRAIN_STEPS = 256  # enough for at least one update of most agents
CHUNK = 1_000  # steps between two looks at whether an agent has learned
LEARNED = {"discrete": 0.7, "box": 0.4}  # mean rewards in `Identity`; chance is 0.33, and 0 at best


def construction(subject: Subject) -> str | None:
    """The factory gives an object with the four methods."""
    agent = subject.fresh()
    missing = [m for m in ("learn", "predict", "save", "load") if not callable(getattr(agent, m, None))]
    if missing:
        fail(
            f"{type(agent).__name__} has no {', '.join(missing)}",
            "learn(total_timesteps), predict(observation, state, episode_start, deterministic), "
            "save(path) and the classmethod load(path, env)",
            "a factory that returns the class, or the policy instead of the agent",
        )
    return None


def in_space(space: gym.Space, action: Any) -> bool:
    """Whether an environment can execute the action: value and shape count, the float type does not."""
    if isinstance(space, spaces.Box):
        array = np.asarray(action)
        return array.shape == space.shape and bool(((array >= space.low) & (array <= space.high)).all())
    return bool(space.contains(action))


def actions(subject: Subject) -> str | None:
    """Predicted actions, and those of training, lie in the action space."""
    env, probes = subject.environment()
    agent = subject.agent(env)
    space, observation_space = probes[0].action_space, probes[0].observation_space
    causes = (
        "the space's `start` added twice or not at all", "a Box action that is not clipped to its bounds",
        "an array [1] returned for a single observation, or one action for a batch",
    )
    observations = subject.observations()
    for deterministic in (True, False):
        for observation in observations:
            action, _ = agent.predict(observation, deterministic=deterministic)
            if not in_space(space, action):
                fail(f"predict(observation, deterministic={deterministic}) gave {action!r}",
                     f"an element of {space}", *causes)

    batch, note = stack(observation_space, observations), None
    for deterministic in (True, False):
        try:
            batch_actions, _ = agent.predict(batch, deterministic=deterministic)
        except Exception as error:  # batches are not required; the report says that there are none
            note = f"predict takes no batch of observations ({type(error).__name__}: {error})"
            break
        if len(batch_actions) != len(observations):
            fail(f"{len(batch_actions)} actions for a batch of {len(observations)} observations",
                 "one action per observation", *causes)
        for action in batch_actions:
            if not in_space(space, action):
                fail(f"predict(batch, deterministic={deterministic}) has the action {action!r}",
                     f"elements of {space}", *causes)

    agent.learn(TRAIN_STEPS)
    for probe in probes:
        for action in probe.actions:
            if not in_space(space, action if action.ndim else action[()]):
                fail(f"learn stepped the environment with {action!r}", f"an element of {space}", *causes)
    return note


def seed(subject: Subject) -> str | None:
    """Two agents with one seed do the same while they train, and predict the same afterwards."""
    runs = []
    for _ in range(2):
        env, probes = subject.environment()
        agent = subject.agent(env)
        agent.learn(TRAIN_STEPS)
        observations = subject.observations()
        runs.append({
            "actions of training": [action for probe in probes for action in probe.actions],
            "deterministic predictions": [agent.predict(o, deterministic=True)[0] for o in observations],
            "sampled predictions": [agent.predict(o, deterministic=False)[0] for o in observations],
        })
    for what in runs[0]:
        first, second = runs[0][what], runs[1][what]
        pairs = enumerate(zip(first, second, strict=False))
        differing = [i for i, (a, b) in pairs if not np.array_equal(a, b)]
        if differing or len(first) != len(second):
            counts = f"{len(first)} and {len(second)} of them"
            where = f"from number {differing[0]} on" if differing else counts
            fail(f"two agents built with seed={subject.seed} differ in their {what} ({where})",
                 "equal seeds give equal runs",
                 "sampling from a generator that the seed does not reach",
                 "weights initialised before seeding",
                 "the environment's first reset gets no seed",
                 "the order of a set or of threads")
    return None


def predictions(agent: Any, env: gym.Env, observations: list[Any]) -> tuple[list[Any], Any]:
    """Deterministic actions, and the probabilities of discrete ones where the agent can tell them."""
    chosen = [copy.deepcopy(agent.predict(o, deterministic=True)[0]) for o in observations]
    if not isinstance(env.action_space, spaces.Discrete):
        return chosen, None
    space = env.observation_space
    if hasattr(agent, "action_probabilities"):
        return chosen, np.asarray(agent.action_probabilities(stack(space, observations)))
    if type(agent).__module__.startswith(("stable_baselines3.", "sb3_contrib.")):
        from agents.sb3 import action_probabilities_sb3

        return chosen, action_probabilities_sb3(agent, stack(space, observations))
    return chosen, None


def save_load(subject: Subject) -> str | None:
    """An agent that was saved and loaded on a fresh environment predicts as before."""
    env, probes = subject.environment()
    agent = subject.agent(env)
    agent.learn(TRAIN_STEPS)
    observations = subject.observations()
    path = subject.folder / "saved" / "agent"
    path.parent.mkdir(exist_ok=True)
    agent.save(path)
    before = predictions(agent, probes[0], observations)
    loaded = load_like(agent, path, subject.environment()[0])
    after = predictions(loaded, probes[0], observations)
    different = sum(not np.allclose(a, b, atol=1e-6) for a, b in zip(before[0], after[0], strict=True))
    gap = 0.0
    if before[1] is not None and after[1] is not None:
        gap = float(np.abs(before[1] - after[1]).max())
    if different or gap > 1e-6:
        fail(f"after load, {different} of {len(observations)} deterministic actions differ, "
             f"probabilities by up to {gap:.2g}",
             "the same predictions as before save",
             "the weights are not saved, or not put back", "normalisation statistics are not saved",
             "load builds a new agent with the default configuration")
    return None if before[1] is not None else "compared by deterministic actions"


def learning(subject: Subject) -> str | None:
    """The agent learns to say which context it sees (`Identity`) within the budget of steps."""
    example = subject.environment()[1][0]
    box_actions = isinstance(example.action_space, spaces.Box)
    box_observations = not isinstance(example.observation_space, spaces.Discrete)
    task = Identity(box_observations, box_actions)
    env, probes = subject.environment(lambda: Identity(box_observations, box_actions))
    agent = subject.agent(env)

    def mean_reward() -> float:
        # Sampled where actions are discrete: the most probable one is right by chance too often.
        # The mean of a Gaussian is what moves first, its noise takes far longer to shrink.
        rewards = [
            task.reward(context, agent.predict(task.observe(context), deterministic=box_actions)[0])
            for context in range(task.n_contexts)
            for _ in range(1 if box_actions else 100)
        ]
        return float(np.mean(rewards))

    needed = LEARNED["box" if box_actions else "discrete"]
    first = reward = mean_reward()
    spent = 0
    while reward < needed and spent < subject.budget:
        agent.learn(CHUNK)
        spent = sum(len(probe.actions) for probe in probes)
        reward = mean_reward()
    if reward < needed:
        fail(f"mean reward {first:.2f} before and {reward:.2f} after {spent:,} steps of saying which of "
             f"{task.n_contexts} contexts is shown",
             f"at least {needed}; raise `budget` for an agent that is slow by design",
             "the sign of the loss or of the advantage", "observations and actions paired off by one step",
             "rewards of one environment row given to another", "a learning rate of 0")
    return f"mean reward {first:.2f} before, {reward:.2f} after {spent:,} steps"


def timesteps(subject: Subject) -> str | None:
    """learn(n) returns after about n environment steps, counted by the environment."""
    env, probes = subject.environment()
    agent = subject.agent(env)

    def count() -> int:
        return sum(len(probe.actions) for probe in probes)

    agent.learn(1)
    iteration = count()
    asked = max(iteration + iteration // 2, 1000)
    spec = probes[0].spec
    episode = (spec.max_episode_steps if spec is not None else None) or 1000
    # A rollout more than was asked, and the steps of rows that wait for the last episode of another.
    limit = 2 * asked + 2 * iteration + subject.n_envs * episode
    for probe in probes:
        probe.max_steps = len(probe.actions) + 10 * limit
    agent.learn(asked)
    taken = count() - iteration
    if not asked <= taken <= limit:
        fail(f"learn({asked}) took {taken:,} environment steps (learn(1) took {iteration:,})",
             f"from {asked:,} to {limit:,} steps: what was asked, rounded up to whole rollouts",
             "vector steps counted as environment steps (or the other way round)",
             "total_timesteps compared with a counter that an earlier learn has moved",
             "total_timesteps read as iterations")
    return f"learn({asked}) took {taken:,} steps"
