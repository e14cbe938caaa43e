"""Small token tasks, and all of their responses by brute force, for tests."""

from itertools import product as words_over
from typing import NamedTuple

import gymnasium as gym
import numpy as np

from llmgym.automaton import AutomatonReward, length_rewards, pattern_rewards, repeat_rewards
from llmgym.ngram import NGram
from llmgym.token_rewards import Scores
from llmgym.token_tasks import TokenTask

# Four tokens, the third of which ends a response.
EOS = 2
PATTERNS = (((0, 1), 1.0), ((1, 1, 0), -2.0), ((3,), 0.5), ((0, 1, 0, 1), 0.75))
REPEAT, PER_TOKEN, CUT = -0.4, 0.1, -0.3
PROMPTS = ([0], [3, 1], [1, 2, 0], [0, 3, 3, 1])


def tiny_task(order: int = 2, max_new_tokens: int = 4, seed: int = 0, **kwargs) -> TokenTask:
    """Four prompts of different lengths; one holds the end-of-sequence id."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((5 ** (order - 1), 4))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    reward = AutomatonReward(
        {
            "patterns": pattern_rewards(4, PATTERNS),
            "repeats": repeat_rewards(4, REPEAT),
            "length": length_rewards(4, EOS, PER_TOKEN, CUT),
        }
    )
    return TokenTask(
        PROMPTS, 4, EOS, max_new_tokens, reward, reference=NGram(log_probs, order), **kwargs
    )


class Word(NamedTuple):
    """One response: its tokens, parts of its reward, and its log-prob under the reference."""

    tokens: tuple[int, ...]
    components: dict[str, float]
    ref_logp: float

    @property
    def reward(self) -> float:
        return sum(self.components.values())


def all_words(task: TokenTask, task_id: int) -> list[Word]:
    """Every response to a prompt, rewards and log-probs counted by hand."""
    limit = int(task.limits[task_id])
    others = [token for token in range(4) if token != EOS]
    endings = [(*word, EOS) for n in range(limit) for word in words_over(others, repeat=n)]
    words = endings + list(words_over(others, repeat=limit))
    return [Word(word, reward_of(word), _ref_logp(task, task_id, word)) for word in words]


def reward_of(word: tuple[int, ...]) -> dict[str, float]:
    patterns = sum(
        worth
        for pattern, worth in PATTERNS
        for start in range(len(word))
        if word[start : start + len(pattern)] == pattern
    )
    repeats = sum(REPEAT for one, other in zip(word, word[1:], strict=False) if one == other)
    letters = sum(token != EOS for token in word)
    cut = CUT if word[-1] != EOS else 0.0
    return {"patterns": patterns, "repeats": repeats, "length": PER_TOKEN * letters + cut}


def _ref_logp(task: TokenTask, task_id: int, word: tuple[int, ...]) -> float:
    order, total = task.reference.order, 0.0
    for place, token in enumerate(word):
        before = [4] * order + [int(t) for t in task.prompts[task_id]] + list(word[:place])
        context = 0
        for digit in before[len(before) - (order - 1) :]:
            context = 5 * context + digit
        total += task.reference.log_probs[context, token]
    return total


def as_arrays(words: list[Word]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, T], padded with -7, and lengths [N]."""
    lengths = np.array([len(word.tokens) for word in words])
    tokens = np.full((len(words), lengths.max()), -7)
    for row, word in enumerate(words):
        tokens[row, : lengths[row]] = word.tokens
    return tokens, lengths


def custom_task(reward=lambda responses: Scores(responses.lengths), **kwargs) -> TokenTask:
    """Eight tokens, the sixth ends; no reference; the reward is the length if none is given."""
    settings = {"prompts": [[0, 1, 2], [4]], "vocab_size": 8, "eos_id": 5, "max_new_tokens": 5}
    return TokenTask(**{**settings, "reward": reward, **kwargs})


def make_vec(task: TokenTask | None, n: int, mode: str = "disabled") -> gym.vector.VectorEnv:
    return gym.make_vec("TokenGeneration-v0", num_envs=n, task=task, autoreset_mode=mode)
