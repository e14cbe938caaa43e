"""Where our PPO's time goes: the share of each of its pieces, by timers round their calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import torch

import agents
from agents import training
from common.cartpole import make_cartpole
from common.control import ZOO_CARTPOLE, ZOO_N_ENVS
from common.environments import EpisodeLog

COLLECT, UPDATE = "collect", "update"
PIECES = (
    "collect: environment",
    "collect: policy",
    "collect: bookkeeping",
    "update: advantages",
    "update: minibatches",
    "update: forward, policy",
    "update: forward, loss",
    "update: backward",
    "update: gradient clip",
    "update: optimiser",
    "update: metrics",
    "update: bookkeeping",
    "rest of learn",
)


class PieceTimer:
    """CPU seconds by piece. Pieces nest, and the time of an inner one is not that of the outer."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def piece(self, name: str) -> Iterator[None]:
        """Count the time of the block to `name`, less that of pieces within it."""
        self._turn_over()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn_over()
            self._running.pop()

    def inside(self, phase: str) -> bool:
        """Whether a piece of that phase is running."""
        return any(name.startswith(phase) for name in self._running)

    def wrap(self, function: Callable[..., Any], name: str, by_phase: bool = False) -> Callable[..., Any]:
        """`function` with its calls timed. `by_phase` puts "collect: " or "update: forward, " before."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            prefix = ""
            if by_phase:
                prefix = "update: forward, " if self.inside(UPDATE) else "collect: "
            with self.piece(prefix + name):
                return function(*args, **kwargs)

        return timed

    def _turn_over(self) -> None:
        moment = self._clock()
        if self._running:
            self.seconds[self._running[-1]] += moment - self._since
        self._since = moment


def profile(agent: Any, total_timesteps: int) -> dict[str, float]:
    """CPU seconds of our PPO's `learn` by piece; every piece of `PIECES` is there."""
    timer = PieceTimer()
    # Iterating the minibatches happens in `update`; the time between two of them is not theirs.
    minibatches = agent.minibatches

    def timed_minibatches(batch: Any) -> Iterator[Any]:
        parts = minibatches(batch)
        while True:
            with timer.piece("update: minibatches"):
                part = next(parts, None)
            if part is None:
                return
            yield part

    places: list[tuple[Any, str, str]] = [
        (agent, "collect", "collect: bookkeeping"),
        (agent.collector.env, "step", "collect: environment"),
        (agent.collector.env, "reset", "collect: environment"),
        (agent.policy, "sample", "collect: policy"),
        (agent.policy, "value", "collect: policy"),
        (agent, "update", "update: bookkeeping"),
        (agent, "prepare", "update: advantages"),
        (agent, "loss", "update: forward, loss"),
        (torch.autograd, "grad", "update: backward"),
        (training, "gradient_step", "update: gradient clip"),
        (agent.optimizer, "step", "update: optimiser"),
        (training, "mean_terms", "update: metrics"),
        (training, "kl_ref", "update: metrics"),
        (training, "rollout_metrics", "update: metrics"),
        (training, "explained_variance", "update: metrics"),
    ]
    with ExitStack() as stack:
        for owner, attribute, name in places:
            timed = timer.wrap(getattr(owner, attribute), name)
            stack.enter_context(patch.object(owner, attribute, timed))
        evaluate = timer.wrap(agent.policy.evaluate, "policy", by_phase=True)
        stack.enter_context(patch.object(agent.policy, "evaluate", evaluate))
        stack.enter_context(patch.object(agent, "minibatches", timed_minibatches))
        with timer.piece("rest of learn"):
            agent.learn(total_timesteps)
    return {piece: timer.seconds[piece] for piece in PIECES}


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each piece's share of the whole, from 0 to 1."""
    total = sum(seconds.values())
    return {piece: value / total for piece, value in seconds.items()}


def measure_profile(
    seeds: Sequence[int], steps: int, rounds: int, samples: int, pool_config: dict[str, Any]
) -> dict[str, list[dict[str, float]]]:
    """CPU seconds by piece of one run for each seed, on CartPole and on the answer pool."""
    found: dict[str, list[dict[str, float]]] = {"CartPole": [], "answer pool": []}
    for seed in seeds:
        control = make_cartpole("sync", ZOO_N_ENVS, EpisodeLog(), seed)
        pool = gym.make_vec("AnswerPool-v0", num_envs=samples)
        for name, env, config, total in (
            ("CartPole", control, ZOO_CARTPOLE, steps),
            ("answer pool", pool, pool_config, rounds * samples),
        ):
            found[name].append(profile(agents.make("ppo", env, seed=seed, **config), total))
            env.close()
    return found
