"""Tokens per second of the environment loop, against itself without its cache and against `transformers`.

The loop is the one that every agent trains on: `TokenGeneration-v0`, stepped token by token by a
`Collector`, with a `GPTPolicy` whose cache follows the rows. Beside it stands ``generate`` of
transformers' GPT-2 of the same size, which is given prompts of the same kind and samples from the whole
distribution too. Both have untrained weights; how soon completions end is set by a bias of the
end-of-sequence logit, so that the work is known beforehand. Theirs is GPT-2 as published, with biases
and the tanh form of GELU, where ours has the exact one and no biases; given the exact one, ``generate``
gained 5 to 11% when measured.

What counts is a token of a completion, end-of-sequence included; what ``generate`` computes behind the
end of a row counts as time only. Timed is all of `Collector.collect_episodes`, from the reset to the
finished record, but for the teacher-forced evaluation of the completions at its end (log-probs and
values for the update), which ``generate`` has no part of: that is measured apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from agents.collector import Collector
from agents.policies import GPTPolicy
from agents.policies.kv_cache import KVCache
from common.speed_profile import PieceTimer
from common.timing import Sample, Timing, Work, in_turns, now
from llmgym.token_rewards import Responses, Scores
from llmgym.token_tasks import TokenTask

VOCAB, PROMPT, EOS = 64, 16, 0
SIZE: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 128}
FIXED, EARLY = "tokens, fixed length", "tokens, early ends"
# Chance of end-of-sequence at each token.
EOS_CHANCE = {FIXED: 0.0, EARLY: 1 / 20}
TOKEN_CASES = tuple(EOS_CHANCE)
CACHED, UNCACHED, GENERATE = "loop", "loop without cache", "transformers generate"

NETWORK = "network: "
EVALUATION = "evaluation"
TOKEN_PIECES = (
    NETWORK + "prompts",
    NETWORK + "matrix products, norms",
    NETWORK + "attention, cache writes",
    NETWORK + "head",
    "environment",
    "sampling",
    "bookkeeping: rows of the cache",
    "bookkeeping: records",
)
Report = Callable[[Sample], None]


# --------------------------------------------------------------------------- what is run


def make_task(n_prompts: int, new_tokens: int) -> TokenTask:
    """Random prompts of equal length and a reward that costs nothing."""
    prompts = np.random.default_rng(0).integers(1, VOCAB, size=(n_prompts, PROMPT))
    return TokenTask(list(prompts), VOCAB, EOS, new_tokens, no_reward)


def no_reward(responses: Responses) -> Scores:
    return Scores(np.zeros(len(responses)))


def make_env(task: TokenTask, n_rows: int) -> VectorEnv:
    return gym.make_vec("TokenGeneration-v0", num_envs=n_rows, task=task, autoreset_mode="disabled")


def set_chance(head: torch.nn.Linear, chance: float) -> None:
    """Give end-of-sequence about that chance in every context; the other logits are near 0 untrained."""
    bias = torch.zeros(VOCAB)
    bias[EOS] = torch.logit(torch.tensor(chance)) + math.log(VOCAB - 1)  # minus infinity for chance 0
    head.bias = torch.nn.Parameter(bias)
    head.weight.data[EOS] = 0.0


def make_policy(task: TokenTask, chance: float) -> GPTPolicy:
    env = make_env(task, 1)
    spaces = env.single_observation_space, env.single_action_space
    env.close()
    policy = GPTPolicy(*spaces, torch.Generator().manual_seed(0), **SIZE)
    set_chance(policy.lm_head, chance)
    return policy


def looping(task: TokenTask, policy: GPTPolicy, n_rows: int, cached: bool) -> Work:
    """The work of collecting a completion in each row: tokens, and time without the evaluation."""

    def work(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        env = make_env(task, n_rows)
        collector = Collector(env, policy, torch.Generator().manual_seed(seed), seed)
        evaluate, spent = collector._evaluate, []

        def timed(*args: Any) -> Any:
            start = now()
            evaluation = evaluate(*args)
            spent.append(now() - start)
            return evaluation

        with ExitStack() as stack:
            stack.enter_context(patch.object(collector, "_evaluate", timed))
            if not cached:
                stack.enter_context(patch.object(policy, "new_state", lambda n_rows: None))
            start = now()
            rollout = collector.collect_episodes(1)
            whole = now() - start
        env.close()
        (evaluation,) = spent
        tokens = int(rollout.mask.sum())
        return tokens, whole - evaluation, {"evaluation_cpu": evaluation.cpu}

    return work


def generating(task: TokenTask, chance: float, n_rows: int) -> Work:
    """The work of one call of ``generate``; needs `transformers`.

    Everything is as a user gets it, but for what makes it sample from the whole distribution. At fixed
    length it is told of no end-of-sequence, so that it need not look for any.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch_state = torch.get_rng_state()
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=task.sequence_length, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, **SIZE,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    torch.set_rng_state(torch_state)
    set_chance(model.lm_head, chance)
    options: dict[str, Any] = {
        "max_new_tokens": task.max_new_tokens, "do_sample": True, "top_k": 0, "top_p": 1.0, "use_cache": True,
        "pad_token_id": EOS, "eos_token_id": EOS if chance else None,
    }  # fmt: skip

    def work(seed: int) -> tuple[float, Timing, dict[str, Any]]:
        chosen = np.random.default_rng(seed).integers(task.num_tasks, size=n_rows)
        prompts = torch.from_numpy(np.stack([np.asarray(task.prompts[k]) for k in chosen]))
        attended = torch.ones_like(prompts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            start = now()
            sequences = model.generate(prompts, attention_mask=attended, **options)
            timing = now() - start
        return count_tokens(sequences[:, PROMPT:].numpy()), timing, {}

    return work


def count_tokens(completions: np.ndarray) -> int:
    """Tokens up to the first end-of-sequence of each row, which counts too; int [N, T]."""
    is_eos = completions == EOS
    length = np.where(is_eos.any(1), is_eos.argmax(1) + 1, completions.shape[1])
    return int(length.sum())


# --------------------------------------------------------------------------- measured in turns


def has_transformers() -> bool:
    """Whether `transformers` can be imported: it belongs to the extra "llm"."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def measure_tokens(
    seeds: Sequence[int], turns: int, n_rows: int, new_tokens: int, report: Report
) -> tuple[list[Sample], dict[str, list[dict[str, float]]]]:
    """Samples of every arm, at fixed length and with early ends, and profiles of the loop.

    Without `transformers` its arm is left out.
    """
    samples, profiles = [], {}
    task = make_task(n_rows, new_tokens)
    for case, chance in EOS_CHANCE.items():
        policy = make_policy(task, chance)
        works = {
            CACHED: looping(task, policy, n_rows, cached=True),
            UNCACHED: looping(task, policy, n_rows, cached=False),
        }
        if has_transformers():
            works[GENERATE] = generating(task, chance, n_rows)
        for name, work in works.items():  # what is built on first use is not what we measure
            if name != UNCACHED:
                work(seeds[0])
        samples += in_turns(case, works, seeds, turns, report)
        profiles[case] = [profile_loop(task, policy, n_rows, seed) for seed in seeds]
    return samples, profiles


# --------------------------------------------------------------------------- where the time goes


def profile_loop(task: TokenTask, policy: GPTPolicy, n_rows: int, seed: int) -> dict[str, float]:
    """CPU seconds of one collection by piece, `TOKEN_PIECES`, and of its evaluation.

    To the network belongs what its answer is computed from: products, norms, attention, the cache's
    growth and mask. What finds out which rows go on, and closes the gaps of the others, is bookkeeping.
    """
    timer = PieceTimer()
    env = make_env(task, n_rows)
    collector = Collector(env, policy, torch.Generator().manual_seed(seed), seed)
    places: list[tuple[Any, str, str]] = [
        (policy.body, "last_hidden", NETWORK + "prompts"),
        (policy.body, "decode", NETWORK + "matrix products, norms"),
        (KVCache, "advance", NETWORK + "attention, cache writes"),
        (KVCache, "attend", NETWORK + "attention, cache writes"),
        (policy, "_logits", NETWORK + "head"),
        (env, "step", "environment"),
        (env, "reset", "environment"),
        (policy, "sample", "sampling"),
        (KVCache, "follow", "bookkeeping: rows of the cache"),
        (KVCache, "admit", "bookkeeping: rows of the cache"),
        (collector, "collect_episodes", "bookkeeping: records"),
    ]
    with ExitStack() as stack:
        for owner, attribute, name in places:
            timed = timer.wrap(getattr(owner, attribute), name)
            stack.enter_context(patch.object(owner, attribute, timed))
        evaluate = timer.wrap(collector._evaluate, EVALUATION)
        stack.enter_context(patch.object(collector, "_evaluate", evaluate))
        collector.collect_episodes(1)
    env.close()
    return {piece: timer.seconds[piece] for piece in (*TOKEN_PIECES, EVALUATION)}
