"""VerifiableMath-v0 played with given responses, for tests."""

import gymnasium as gym
import numpy as np
from countdown import info_of_row

import llmgym  # noqa: F401 (registers the id)
from llmgym.tasks.problems import SPLITS

ID = "VerifiableMath-v0"


def make(**kwargs):
    return gym.make(ID, **kwargs)


def make_vec(n: int, mode: str = "disabled", **kwargs):
    return gym.make_vec(ID, num_envs=n, autoreset_mode=mode, **kwargs)


def play(env, responses) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Step each row of a disabled-mode environment with a response; rewards and end-of-episode info."""
    rewards, last = np.zeros(env.num_envs), [{} for _ in range(env.num_envs)]
    ended = np.zeros(env.num_envs, dtype=bool)
    for step in range(max(map(len, responses))):
        actions = [int(tokens[step]) if step < len(tokens) else 0 for tokens in responses]
        _, paid, terminated, truncated, info = env.step(np.array(actions))
        assert not truncated.any()
        for row in np.flatnonzero(terminated & ~ended):
            last[row] = info_of_row(info, row)
        rewards += paid
        ended = terminated
    assert ended.all()
    return rewards, {key: np.array([info[key] for info in last]) for key in last[0]}


def play_texts(texts: list[str], **kwargs) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Every text a response to the prompt "12+34=" that ends with end-of-sequence where there is room."""
    env = make_vec(len(texts), **kwargs)
    task = env.unwrapped.task
    number = next(k for k, problem in enumerate(task.problems) if problem.prompt in ("12+34=", "34+12="))
    env.reset(seed=0, options={"task_id": number})
    return play(env, [[*task.tokenizer.encode(text), task.eos_id][: task.max_new_tokens] for text in texts])


SPLIT_OF_12_34 = next(
    name for name in SPLITS if any(p.prompt == "12+34=" for p in make().unwrapped.task.math.split(name))
)
WITH_12_34 = {"split": SPLIT_OF_12_34}
