"""Measures of a policy on arithmetic: greedy accuracy, pass@k, and what either verifier pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from agents.collector import Collector
from agents.preferences import Responses, build_responses
from agents.rollout import Episodes
from agents.training import make_generator
from common.math_arms import MAX_NEW_TOKENS

ENV = "llmgym:VerifiableMath-v0"
ROWS = 512  # completions at a time when measuring
Answers = dict[str, np.ndarray]  # "correct", "lenient", "length", "cut", each [N]
Answer = Callable[[VectorEnv, np.ndarray, bool, int], Answers]  # of (env, task ids [N], greedy, seed)


def make_env(
    n_envs: int, task: dict[str, Any], split: str = "train", n_train: int | None = None,
    verifier: str = "strict", seed: int = 0, autoreset: str = "disabled",
) -> VectorEnv:  # fmt: skip
    """The environment of all runs; `task` has the options of `llmgym.tasks.arithmetic.arithmetic`."""
    return gym.make_vec(
        ENV, num_envs=n_envs, task="arithmetic", split=split, n_train=n_train, task_seed=seed,
        verifier=verifier, max_new_tokens=MAX_NEW_TOKENS, autoreset_mode=autoreset, **task,
    )  # fmt: skip


def demonstrations(env: VectorEnv) -> Responses:
    """The solved problems of an environment, as `agents.sft` takes them, as wide as its observations."""
    task = env.unwrapped.task
    prompts, solutions = task.demonstrations()
    built = build_responses([p.tolist() for p in prompts], [s.tolist() for s in solutions], task.pad)
    missing = task.sequence_length - built.observations.shape[1]
    return Responses(torch.nn.functional.pad(built.observations, (0, missing), value=task.pad), built.actions)


def of_episodes(episodes: Episodes) -> Answers:
    """What the verifiers say of some episodes."""
    return {"correct": episodes.info["correct"], "lenient": episodes.info["reward/lenient"],
            "length": episodes.lengths, "cut": episodes.cut}  # fmt: skip


def answer_with(policy: Any) -> Answer:
    """Answers of one of our policies, by the collector that training uses."""

    def answer(env: VectorEnv, task_ids: np.ndarray, greedy: bool, seed: int) -> Answers:
        collector = Collector(env, policy, make_generator(seed), seed)
        rollout = collector.collect_tasks(task_ids, np.arange(len(task_ids)), greedy)
        order = np.argsort(rollout.episodes.group_ids)  # episodes are in the order of their ends
        return of_episodes(rollout.episodes.select(order))

    return answer


def accuracy(answer: Answer, env: VectorEnv) -> float:
    """Share of all problems of an environment whose most probable answer is right."""
    every = np.arange(env.unwrapped.task.num_tasks)
    return float(answer(env, every, True, 0)["correct"].mean())


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Probability that one of k samples is right, mean over problems.

    ``1 - C(n - c, k) / C(n, k)`` with c of n samples right, unbiased (Chen et al., "Evaluating Large
    Language Models Trained on Code", 2021, section 2.1).

    Args:
        correct: [problems, n], 0 or 1.
        k: at most n.
    """
    n, right = correct.shape[1], correct.sum(axis=1)
    # C(n - c, k) / C(n, k) as a product of k factors; one of them is 0 where n - c < k.
    failing = np.prod([np.clip(n - right - i, 0, None) / (n - i) for i in range(k)], axis=0)
    return float(1.0 - failing.mean())


def measure(answer: Answer, env: VectorEnv, problems: int, samples: int, seed: int) -> dict[str, Any]:
    """Greedy accuracy on all problems of a split, and samples of some of them, evenly spread."""
    total = env.unwrapped.task.num_tasks
    chosen = np.linspace(0, total - 1, min(problems, total)).astype(int)
    found = answer(env, chosen.repeat(samples), False, seed)
    correct = found["correct"].reshape(len(chosen), samples)
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k <= samples]
    return {
        "accuracy": accuracy(answer, env),
        "pass_at_k": {str(k): pass_at_k(correct, k) for k in ks},
        "lenient": float(found["lenient"].mean()),
        "length": float(found["length"].mean()),
        "cut": float(found["cut"].mean()),
    }
