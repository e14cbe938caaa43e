"""Expected gradients of agents that compare whole episodes, by summation over all that can be sampled.

A row of answers (one for each episode of a rollout) has the probability that the policy gives it. The
agent's gradient on it, weighed by that and added up over all rows, is its expected gradient: exactly, so
that nothing has to be averaged over seeds.
"""

import itertools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from worlds import ascent_direction

from llmgym import AnswerPool

PROBABILITIES = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]])
LOGITS = np.log(PROBABILITIES)
POOL = AnswerPool.random(2, 3, seed=4, ref_spread=1.0)
ONE_PROMPT = AnswerPool.random(1, 3, seed=4, ref_spread=1.0)


class TasksInTurn(VectorWrapper):
    """Without a task id in the options, the rows of a reset show the prompts 0, 1, 0, 1, ... in turn."""

    def __init__(self, env: VectorEnv, n_prompts: int) -> None:
        super().__init__(env)
        self.prompts = np.arange(env.num_envs) % n_prompts

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options=options or {"task_id": self.prompts})


def expected_ascent(
    make: Callable[[Any], Any], group_size: int, old: Any = None, pool: AnswerPool = POOL
) -> np.ndarray:
    """The expected ascent direction of an agent over one group of each of the pool's prompts, [P, 3].

    Args:
        make: of an environment, an agent with P groups of ``group_size`` sampled episodes.
        old: [P, 3], the policy that samples; None: the one that is differentiated, `PROBABILITIES`.
    """
    n_prompts = pool.n_prompts
    sampling = PROBABILITIES[:n_prompts] if old is None else np.asarray(old)
    n_episodes = n_prompts * group_size
    agent = make(TasksInTurn(gym.make_vec("AnswerPool-v0", num_envs=n_episodes, pool=pool), n_prompts))
    total = np.zeros((n_prompts, 3))
    prompts = np.arange(n_prompts).repeat(group_size)
    for row in itertools.product(range(3), repeat=n_episodes):
        agent.policy.logits.data = torch.tensor(np.log(sampling), dtype=torch.float32)
        agent.policy.sample = lambda observations, generator, row=row: torch.tensor(row)
        batch = agent.prepare(agent.collect())
        agent.policy.logits.data = torch.tensor(LOGITS[:n_prompts], dtype=torch.float32)
        total += sampling[prompts, row].prod() * ascent_direction(agent, batch)
    return total
