"""Policies that data is collected with: found by name, made anew for every shard, with their log-probs.

A policy is any object with ``predict`` (see `agents.agent.Agent`). What collection needs besides is in
`Acting`: whether it carries a state from step to step, and the log-probability of an action where the
policy knows it.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from agents.run_folder import UserError, read_config
from agents.runs import is_ours, newest_save, user_errors
from llmgym.checks import did_you_mean
from offline.behaviour import WEIGHTS, BehaviourPolicy

NAMES = ("medium", "mixed", "random", "reference", "replay")
EVALUATED_AT_ONCE = 1024  # observations whose log-probs are computed together
# The float32 nearest to 1 from below: an action that was rounded onto its bound has no finite density.
LARGEST_UNIT = 1.0 - 2.0**-24

LogProb = Callable[[np.ndarray, np.ndarray], "np.ndarray | None"]


@dataclass(frozen=True)
class Source:
    """Where a policy comes from: plain data, of which any process makes the same policy.

    ==========  ==================================================================================
    name        as it was asked for
    kind        "random", "reference", "replay", "behaviour" (an .npz file) or "agent"
    path        its file, where it has one, and the SHA-256 of what is in it
    agent       name for `agents.make` of an "agent"
    ==========  ==================================================================================
    """

    name: str
    kind: str
    path: str | None = None
    sha256: str | None = None
    agent: str | None = None


@dataclass
class Acting:
    """A policy in use.

    Attributes:
        policy: ``predict(observations [N, ...], state, episode_start) -> (actions [N, ...], state)``.
        log_prob: of actions [N, ...] at observations [N, ...], in nats, float64 [N]; None where it is
            not known.
        stateless: the state that ``predict`` returns need not be passed on.
        about: what the policy's file says of it.
    """

    policy: Any
    log_prob: LogProb = lambda observations, actions: None
    stateless: bool = False
    about: dict[str, Any] = field(default_factory=dict)


# --------------------------------------------------------------------------- by name


def find(name: str, env_id: str, load: Path | None = None) -> Source:
    """The source of a policy.

    Args:
        name: "medium", the policy that is shipped for the environment; "random"; "reference", the policy
            that the environment itself names as such; "replay", all that a new agent meets while it is
            trained; the path of a file of `offline.behaviour` or of a run folder of ``llmgym train``; or a
            name for `agents.make`, with ``load``.
        load: what an agent of that name has saved.

    Raises:
        UserError: unknown name; no such file; an agent without ``load``, or ``load`` without an agent.
    """
    path = Path(name)
    if load is not None:
        if name in NAMES or path.exists():
            raise UserError(f"load={str(load)!r} goes with the name of an agent, not with policy={name!r}")
        return Source(name, "agent", str(load), _digest("load", load), name)
    if name in ("random", "reference", "replay"):
        return Source(name, name)
    if name == "medium":
        path = WEIGHTS / f"{env_id.rpartition(':')[2]}-medium.npz"
        if not path.exists():
            shipped = sorted(p.name.removesuffix("-medium.npz") for p in WEIGHTS.glob("*-medium.npz"))
            raise UserError(
                f"policy='medium': none is shipped for {env_id}, but for {', '.join(shipped) or 'nothing'}; "
                f"train one with `python -m offline.train_behaviour --env {env_id} --target RETURN "
                "--out FILE.npz` and give --policy FILE.npz"
            )
    if path.is_dir():
        config = read_config(path)
        try:
            save = newest_save(path)
        except IndexError:
            raise UserError(f"policy={name!r} has no checkpoint yet: `llmgym resume {name}`") from None
        save = save if save.is_file() else save / "agent"
        return Source(name, "agent", str(save), _digest("policy", save), config.agent)
    if path.suffix == ".npz":
        return Source(name, "behaviour", str(path), _digest("policy", path))
    if path.exists():
        raise UserError(
            f"policy={name!r} is neither a .npz file nor a run folder; for an agent's own file give its name "
            f"and the file: --policy sb3:PPO --load {name}"
        )
    raise UserError(
        f"policy={name!r} is unknown{did_you_mean(name, NAMES)}; allowed: {', '.join(NAMES)}, a path that "
        "exists, or the name of an agent (`llmgym agents`) with --load PATH"
    )


def _digest(option: str, path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder; SB3 adds .zip to the name it is given."""
    found = next((p for p in (path, path.with_name(path.name + ".zip")) if p.exists()), None)
    if found is None:
        raise UserError(f"{option}={str(path)!r} does not exist")
    digest = hashlib.sha256()
    files = sorted(p for p in found.rglob("*") if p.is_file()) if found.is_dir() else [found]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def make(source: Source, env: gym.Env, seed: int) -> Acting:
    """The policy in its first state, seeded: equal sources and seeds act equally.

    Raises:
        UserError: it cannot be loaded, or does not fit the environment.
    """
    with user_errors(f"policy {source.name!r}"):
        if source.kind == "random":
            return _uniform(env.action_space, seed)
        if source.kind == "reference":
            return _reference(env, seed)
        if source.kind == "behaviour":
            return _behaviour(str(source.path), env, seed)
        return _agent(str(source.agent), str(source.path), env, seed)


# --------------------------------------------------------------------------- kinds


class _Uniform:
    """``action_space.sample()``."""

    def __init__(self, space: gym.Space, seed: int) -> None:
        self._space = copy.deepcopy(space)
        self._space.seed(seed)

    def predict(self, observation: Any, state: Any = None, episode_start: Any = None) -> tuple[Any, Any]:
        return np.stack([self._space.sample() for _ in observation]), None


def _uniform(space: gym.Space, seed: int) -> Acting:
    if isinstance(space, Discrete):
        density = -float(np.log(space.n))
    elif isinstance(space, Box) and space.is_bounded():
        density = -float(np.log(np.asarray(space.high, float) - space.low).sum())
    else:  # Gymnasium draws from other distributions where a bound is missing
        return Acting(_Uniform(space, seed), stateless=True)
    return Acting(_Uniform(space, seed), lambda s, a: np.full(len(a), density), stateless=True)


class _Categorical:
    """Draws from log-probs [N, A] of a Discrete space, by one uniform number a row."""

    def __init__(self, log_probs: Callable[[np.ndarray], np.ndarray], start: int, seed: int) -> None:
        self.log_probs = log_probs
        self.start = start
        self._random = np.random.default_rng(seed)

    def predict(self, observation: Any, state: Any = None, episode_start: Any = None) -> tuple[Any, Any]:
        # Cumulated probabilities may end just below 1: the last column is taken whatever u is.
        cumulated = np.exp(self.log_probs(observation)).cumsum(axis=1)[:, :-1]
        return (cumulated <= self._random.random((len(cumulated), 1))).sum(axis=1) + self.start, None


def _reference(env: gym.Env, seed: int) -> Acting:
    task = getattr(env.unwrapped, "task", None)
    table = getattr(env.unwrapped, "reference_logp", None)
    reference = getattr(task, "reference", None)
    if table is not None:

        def log_probs(observations: np.ndarray) -> np.ndarray:
            return table[observations]
    elif reference is not None:
        n_tokens = task.vocab_size  # type: ignore[union-attr]

        def log_probs(observations: np.ndarray) -> np.ndarray:
            lengths = (observations != n_tokens).sum(axis=1)
            tokens, lengths = np.repeat(observations, n_tokens, axis=0), np.repeat(lengths, n_tokens)
            every = np.tile(np.arange(n_tokens), len(observations))
            return np.asarray(reference.log_prob(tokens, lengths, every)).reshape(-1, n_tokens)
    else:
        raise ValueError(f"{env.spec.id if env.spec else env} names no reference policy")
    assert isinstance(env.action_space, Discrete)
    start = int(env.action_space.start)
    return Acting(_Categorical(log_probs, start, seed), _chosen(log_probs, start), stateless=True)


def _chosen(log_probs: Callable[[np.ndarray], np.ndarray | None], start: int) -> LogProb:
    """The log-probs of the actions out of those of all actions, some observations at a time."""

    def log_prob(observations: np.ndarray, actions: np.ndarray) -> np.ndarray | None:
        found = []
        for first in range(0, len(actions), EVALUATED_AT_ONCE):
            rows = slice(first, first + EVALUATED_AT_ONCE)
            everything = log_probs(observations[rows])
            if everything is None:
                return None
            found.append(everything[np.arange(len(everything)), actions[rows] - start])
        return np.concatenate(found)

    return log_prob


def _behaviour(path: str, env: gym.Env, seed: int) -> Acting:
    try:
        policy = BehaviourPolicy.load(path, env)
    except BadZipFile as error:
        raise ValueError(f"{path} is no .npz file: {error}") from error
    policy.seed(seed)

    def log_prob(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return squashed_log_prob(*policy.distribution(observations), actions, policy.low, policy.high)

    return Acting(policy, log_prob, stateless=True, about=policy.about)


def squashed_log_prob(
    mean: np.ndarray, std: np.ndarray, actions: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """log p(a) of ``a = low + (tanh(u) + 1) / 2 * (high - low)``, u ~ N(mean, diag(std^2)).

    Haarnoja et al. 2018, appendix C, equation 21, with the constant of stretching to the bounds. An
    action on its bound, which is where float32 rounds |u| > 9 to, counts as the nearest one inside.

    Args:
        mean, std: [N, A], of u.
        actions: [N, A], within the bounds.
        low, high: [A].

    Returns:
        float64 [N], in nats.
    """
    half = (np.asarray(high, np.float64) - low) / 2
    unit = np.clip((actions - np.asarray(low, np.float64)) / half - 1, -LARGEST_UNIT, LARGEST_UNIT)
    z = (np.arctanh(unit) - mean) / np.asarray(std, np.float64)
    normal = -0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return (normal - np.log1p(-(unit**2)) - np.log(half)).sum(axis=-1)


def _agent(name: str, path: str, env: gym.Env, seed: int) -> Acting:
    import torch

    from agents import registry

    agent = registry.load(name, path, env)
    random.seed(seed)  # for agents that draw from the global generators
    np.random.seed(seed)
    torch.manual_seed(seed)
    generator = getattr(agent, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    acting = Acting(agent, stateless=is_ours(agent))  # ours compute anew what they are not handed
    if isinstance(env.action_space, Discrete):
        # Of continuous actions the density is that before clipping, which the log does not hold.
        acting.log_prob = _chosen(lambda s: _log_probabilities(agent, s), int(env.action_space.start))
    return acting


def _log_probabilities(agent: Any, observations: np.ndarray) -> np.ndarray | None:
    """Exact log-probs of all actions, float64 [N, A]; None where the agent does not give them."""
    probabilities = None
    if hasattr(agent, "action_probabilities"):
        probabilities = agent.action_probabilities(observations)
    elif hasattr(getattr(agent, "policy", None), "get_distribution"):
        from agents.sb3 import action_probabilities_sb3

        probabilities = action_probabilities_sb3(agent, observations)
    if probabilities is None:
        return None
    with np.errstate(divide="ignore"):  # an action that is ruled out
        return np.log(np.asarray(probabilities, np.float64))
