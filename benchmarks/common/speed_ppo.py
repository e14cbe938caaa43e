"""Our PPO against Stable-Baselines3's: equal settings, seconds to a score, and the answer pool.

With equal settings on CartPole ours steps Gymnasium's ``SyncVectorEnv``, SB3 its ``DummyVecEnv``, of the
same scalar environments; on the answer pool both step its native vector environment, which is the
faster for both. Making agent and environment is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import agents
from agents.sb3 import make_sb3
from common.cartpole import ScoreClock, make_cartpole
from common.control import ZOO_CARTPOLE, ZOO_N_ENVS
from common.environments import EpisodeLog
from common.speed_settings import OURS_BEST, SB3_BEST, SB3_ZOO
from common.stats import last_mean
from common.timing import Sample, Timing, Work, in_turns, now
from llmgym import AnswerPool

OURS, SB3, BARE = "our PPO", "SB3's PPO", "bare loop"
# SB3's PPO as at ours: the same settings, and native rows through `agents.sb3`.
SB3_OURS, SB3_PUBLISHED = "SB3's PPO on native rows", "SB3's PPO, Zoo settings"
THRESHOLD = 475.0
Report = Callable[[Sample], None]


def make_ppo(arm: str, env: Any, seed: int, config: dict[str, Any]) -> Any:
    """PPO of the library that the arm names."""
    if arm == OURS:
        return agents.make("ppo", env, seed=seed, **config)
    return make_sb3("sb3:PPO", env, seed=seed, **config)


def warm_up() -> None:
    """Train briefly with both: what is imported and built on first use is not what we measure."""
    for arm in (OURS, SB3):
        training(arm, 512)(0)


# --------------------------------------------------------------------------- (a) equal settings


def training(arm: str, steps: int) -> Work:
    """The work of training on CartPole with RL Baselines3 Zoo's settings, both schedules to 0."""

    def work(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        log = EpisodeLog()
        env = make_cartpole("sync" if arm == OURS else "dummy", ZOO_N_ENVS, log, seed)
        agent = make_ppo(arm, env, seed, ZOO_CARTPOLE)
        start = now()
        agent.learn(steps)
        timing = now() - start
        env.close()
        return log.steps, timing, {"final_return": last_mean(log.returns)}

    return work


def measure_identical(seeds: Sequence[int], turns: int, steps: int, report: Report) -> list[Sample]:
    """Environment steps per second of both at the Zoo's settings."""
    works = {arm: training(arm, steps) for arm in (OURS, SB3)}
    return in_turns("CartPole, Zoo settings", works, seeds, turns, report)


# --------------------------------------------------------------------------- (b) seconds to a score


def reaching(arm: str, settings: dict[str, Any], budget: float) -> Work:
    """The work of training until the mean of 100 episodes reaches `THRESHOLD`: one unit.

    Args:
        settings: the agent's config, and the keys env (see `make_cartpole`), n_envs, total_timesteps
            (to which schedules run).
        budget: CPU seconds. A run that does not get there counts as this much.
    """
    config = dict(settings)
    kind, n_envs, total = (config.pop(key) for key in ("env", "n_envs", "total_timesteps"))

    def work(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        log = EpisodeLog()
        env = make_cartpole(kind, n_envs, log, seed)
        agent = make_ppo(arm, env, seed, config)
        clock = ScoreClock(THRESHOLD, budget)
        log.on_episode = clock
        while clock.running():  # schedules that have run out start again
            agent.learn(total, callback=clock.running)
        env.close()
        timing, reached = clock.result()
        return 1.0, timing, {"reached": reached, "env_steps": log.steps}

    return work


def measure_threshold(seeds: Sequence[int], budget: float, report: Report) -> list[Sample]:
    """Runs to the score: each at its best, SB3 exactly as ours, and SB3 at the settings published for it.

    One turn for each seed, because equal seeds give equal runs.
    """
    works = {
        OURS: reaching(OURS, OURS_BEST, budget),
        SB3: reaching(SB3, SB3_BEST, budget),
        SB3_OURS: reaching(SB3, OURS_BEST, budget),
        SB3_PUBLISHED: reaching(SB3, SB3_ZOO, budget),
    }
    return in_turns("CartPole to 475", works, seeds, 1, report)


# --------------------------------------------------------------------------- (c) the answer pool


def choosing(arm: str, rounds: int, samples: int, beta: float, config: dict[str, Any]) -> Work:
    """The work of training on the default answer pool: `rounds` rounds of `samples` answers each."""

    def work(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        pool = AnswerPool.default()
        if arm == BARE:
            start = now()
            policy, updates = bare_loop(pool, seed, rounds, samples, beta, config)
            timing = now() - start
        else:
            env = gym.make_vec("AnswerPool-v0", num_envs=samples)
            agent = make_ppo(arm, env, seed, config)
            start = now()
            agent.learn(rounds * samples)
            timing = now() - start
            policy = agents.action_probabilities(agent, np.arange(pool.n_prompts), pool.n_answers)
            # SB3 counts the passes over a rollout: with one minibatch a pass, its optimiser steps.
            updates = agent.n_updates if arm == OURS else agent._n_updates
            env.close()
        distance = pool.kl(policy, pool.optimal_policy(beta))
        return rounds * samples, timing, {"kl_opt": distance, "updates": updates}

    return work


def bare_loop(
    pool: AnswerPool, seed: int, rounds: int, samples: int, beta: float, config: dict[str, Any]
) -> tuple[np.ndarray, int]:
    """The same training with nothing around it: no environment, no records, no metrics.

    PPO's clipped loss on one row of logits and one value, whitened advantages, a clipped gradient,
    Adam. What it takes is about what torch's autograd takes for so many updates.

    Returns:
        The policy [1, A], and the number of optimiser steps.
    """
    ref = torch.tensor(np.log(pool.ref_probs[0]), dtype=torch.float32)
    rewards = torch.tensor(pool.proxy[0], dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.cat([ref, torch.zeros(1)]).requires_grad_()  # the logits, then the value
    adam = torch.optim.Adam([weights], lr=config["learning_rate"], eps=1e-5, fused=True)
    low, high = 1.0 - config["clip_range"], 1.0 + config["clip_range"]
    updates = 0
    for _ in range(rounds):
        with torch.no_grad():
            logp = torch.log_softmax(weights[:-1], -1)
            answers = torch.multinomial(logp.exp(), samples, replacement=True, generator=generator)
            old = logp[answers]
            returns = rewards[answers] - beta * (old - ref[answers])
            advantages = returns - weights[-1]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(config["n_epochs"]):
            ratio = torch.exp(torch.log_softmax(weights[:-1], -1)[answers] - old)
            surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
            loss = 0.5 * (weights[-1] - returns).square().mean() - surrogate.mean()
            (gradient,) = torch.autograd.grad(loss, [weights])
            weights.grad = gradient * (0.5 / gradient.norm()).clamp(max=1.0)
            adam.step()
            updates += 1
    return torch.softmax(weights[:-1].detach(), -1).numpy()[None], updates


def measure_pool(
    seeds: Sequence[int],
    turns: int,
    rounds: int,
    samples: int,
    beta: float,
    configs: dict[str, dict[str, Any]],
    report: Report,
) -> list[Sample]:
    """Answers per second of both, and of the bare loop, at equal samples and updates.

    Args:
        configs: settings of the arms `OURS` and `SB3`; the bare loop has those of ours.
    """
    configs = configs | {BARE: configs[OURS]}
    works = {arm: choosing(arm, rounds, samples, beta, config) for arm, config in configs.items()}
    return in_turns("answer pool", works, seeds, turns, report)
