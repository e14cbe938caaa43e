"""Small environments and helpers that the tests of the algorithms share."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from llmgym import AnswerPool


class Identity(gym.Env):
    """Reward 1 where the action is the observation; observations are random; 20 steps."""

    observation_space, action_space = gym.spaces.Discrete(5), gym.spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.state = 20, int(self.np_random.integers(5))
        return self.state, {}

    def step(self, action):
        reward = float(action == self.state)
        self.left, self.state = self.left - 1, int(self.np_random.integers(5))
        return self.state, reward, False, self.left == 0, {}


class Constantly(gym.Env):
    """One observation, four actions, one step; the same reward whatever is done."""

    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(4)
    reward = 1.0

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, self.reward, True, False, {}


def sync(env_id: str, num_envs: int = 2, **kwargs) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gym.make(env_id, **kwargs)] * num_envs)


def parameters(agent) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in agent.policy.parameters()])


# --- every action of a small pool, in exactly the share that the policy gives it ---

COUNTS = np.array([[1, 2, 3, 2], [4, 1, 1, 2]])  # of 8 rows per prompt
POOL = AnswerPool.random(2, 4, seed=3)


class FixedTasks(VectorWrapper):
    """The first eight rows always show prompt 0, the other eight prompt 1."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options={"task_id": np.repeat([0, 1], 8)})


def enumeration(make_agent):
    """An agent whose next rollout holds each action as often as its policy gives it.

    The mean over that rollout is the expectation over the policy, exactly. Returns the agent and the
    logits of its policy.
    """
    env: VectorEnv = FixedTasks(gym.make_vec("AnswerPool-v0", num_envs=16, pool=POOL))
    agent = make_agent(env)
    logits = np.log(COUNTS / 8)
    agent.policy.logits.data = torch.tensor(logits, dtype=torch.float32)
    actions = np.concatenate([np.repeat(np.arange(4), row) for row in COUNTS])
    agent.policy.sample = lambda observations, generator: torch.tensor(actions)
    return agent, logits


def ascent_direction(agent, batch) -> np.ndarray:
    """Minus the gradient of the agent's loss with respect to the logits of its table."""
    agent.policy.zero_grad()
    agent.loss(batch).total.backward()
    return -agent.policy.logits.grad.numpy()


def softmax_gradient(logits: np.ndarray, objective) -> np.ndarray:
    """Gradient of objective(log-probs [P, A]) with respect to the logits, by autograd in float64."""
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    objective(torch.log_softmax(x, -1)).backward()
    assert x.grad is not None
    return x.grad.numpy()
