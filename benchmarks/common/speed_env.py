"""Environment steps per second: a native vector environment against ``SyncVectorEnv``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

import llmgym  # noqa: F401  (registers its ids with Gymnasium)
from common.timing import Sample, Timing, Work, in_turns, now
from llmgym import AnswerPool
from llmgym.vector import AutoresetMode, autoreset_mode

NATIVE, SYNC = "native", "SyncVectorEnv"
ARMS = {NATIVE: "vector_entry_point", SYNC: "sync"}
N_ACTIONS = 16  # batches of random actions drawn beforehand and used over and over


@dataclass(frozen=True)
class EnvCase:
    """An environment to step: its id and the arguments of ``make_vec``."""

    name: str
    env_id: str
    kwargs: dict[str, Any]


def env_cases() -> list[EnvCase]:
    """The answer pool as it comes, one with many prompts and noise, and CartPole for reference."""
    contextual = {"pool": AnswerPool.random(64, 50, seed=0), "noise": 0.1}
    return [
        EnvCase("AnswerPool, default", "AnswerPool-v0", {}),
        EnvCase("AnswerPool, 64 prompts, noise", "AnswerPool-v0", contextual),
        EnvCase("CartPole-v1 (Gymnasium)", "CartPole-v1", {}),
    ]


def step_for(env: VectorEnv, actions: np.ndarray, seconds: float) -> tuple[int, Timing]:
    """Step a reset environment for about that many CPU seconds: transitions, and the time they took.

    Only real transitions count: under next-step autoreset a row that has ended spends its next step
    on the reset. An even number of steps, so that a one-step task is never caught half-way.

    Args:
        actions: [K, N], used in turn.
    """
    next_step = autoreset_mode(env) is AutoresetMode.NEXT_STEP
    resetting = np.zeros(env.num_envs, bool)
    transitions = step = 0
    start = now()
    elapsed = Timing(0.0, 0.0)
    while elapsed.cpu < seconds:
        for _ in range(2):
            _, _, terminated, truncated, _ = env.step(actions[step % len(actions)])
            step += 1
            transitions += env.num_envs - int(np.count_nonzero(resetting))
            if next_step:
                resetting = (terminated | truncated) & ~resetting
        elapsed = now() - start
    return transitions, elapsed


def stepping(env: VectorEnv, seconds: float) -> Work:
    """The work of stepping `env` with random actions, each time from a fresh reset."""

    def work(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        env.action_space.seed(seed)
        actions = np.stack([env.action_space.sample() for _ in range(N_ACTIONS)])
        env.reset(seed=seed)
        for index in range(2):  # what is made on first use is not what we measure
            env.step(actions[index])
        # Reset again: the flags of rows that have ended start from none, as `step_for` assumes.
        env.reset(seed=seed)
        transitions, timing = step_for(env, actions, seconds)
        return transitions, timing, {"n_envs": env.num_envs}

    return work


def case_name(case: EnvCase, n_envs: int) -> str:
    return f"{case.name} x {n_envs}"


def measure_env(
    sizes: Sequence[int],
    seeds: Sequence[int],
    turns: int,
    seconds: float,
    report: Callable[[Sample], None],
) -> list[Sample]:
    """Samples of every case and number of environments, native and ``SyncVectorEnv`` in turns."""
    samples = []
    for case in env_cases():
        for n_envs in sizes:
            envs = {
                arm: gym.make_vec(case.env_id, n_envs, vectorization_mode=mode, **case.kwargs)
                for arm, mode in ARMS.items()
            }
            works = {arm: stepping(env, seconds) for arm, env in envs.items()}
            samples += in_turns(case_name(case, n_envs), works, seeds, turns, report)
            for env in envs.values():
                env.close()
    return samples
