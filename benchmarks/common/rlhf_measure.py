"""What a policy of the RLHF pipeline is worth: by samples at any size, exactly where all responses fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from agents.batch import episode_batch
from agents.collector import Collector
from agents.policies.base import Policy
from agents.reward_model import RewardModel
from agents.training import make_generator, single_thread
from common.rlhf_pipeline import ENV, LearnedReward, as_records, as_responses, learned_task
from llmgym.token_rewards import Responses
from llmgym.token_solution import TokenSolution
from llmgym.token_tasks import TokenTask

# ---------------------------------------------------------------------------------------- by samples


@dataclass(frozen=True)
class Sampled:
    """Responses that a policy gave in the environment.

    log_probs, ref_log_probs: float64 [N], of each whole response under the policy and the n-gram.
    entropy: of the next token in nats, mean over all tokens.
    """

    responses: Responses
    proxy: np.ndarray
    gold: np.ndarray
    log_probs: np.ndarray
    ref_log_probs: np.ndarray
    entropy: float


def sample_policy(task: TokenTask, model: RewardModel, policy: Policy, n: int, seed: int) -> Sampled:
    """n responses, the prompts in turn so that each has its share, in one batch of the environment."""
    env = gym.make_vec(ENV, num_envs=n, task=learned_task(task, model), autoreset_mode="disabled")
    collector = Collector(env, policy, make_generator(seed), seed)
    task_ids = np.arange(n) % task.num_tasks
    with single_thread(), torch.no_grad():
        rollout = collector.collect_tasks(task_ids, np.zeros(n, dtype=np.int64))
        zeros = torch.zeros_like(rollout.rewards)
        batch = episode_batch(rollout, zeros, zeros)
        entropy = policy.evaluate(batch.observations, batch.actions).entropy
    env.close()
    assert batch.ref_log_probs is not None and batch.mask is not None
    info = rollout.episodes.info
    return Sampled(
        responses=as_responses(task, batch.observations.numpy(), batch.actions.numpy()),
        proxy=info["reward/proxy"],
        gold=info["reward/gold"],
        log_probs=batch.old_log_probs.double().sum(1).numpy(),
        ref_log_probs=batch.ref_log_probs.double().sum(1).numpy(),
        entropy=float(entropy[batch.mask].mean()),
    )


def sampled_measures(solution: TokenSolution, sampled: Sampled, beta: float) -> dict[str, float | None]:
    """Means over the samples.

    ========  ====================================================================================
    proxy     the reward model's score
    gold      the reward that is meant
    kl        KL(policy || n-gram reference) of whole responses, in nats
    kl_opt    KL(policy || exact optimum of the gold reward at beta), in nats; None at beta 0
    length    tokens
    entropy   of the next token, in nats
    ========  ====================================================================================
    """
    kl_opt = None
    if beta > 0:
        optimum = solution.log_probs(solution.optimal_policy(beta), sampled.responses).sum(axis=1)
        kl_opt = float((sampled.log_probs - optimum).mean())
    return {
        "proxy": float(sampled.proxy.mean()),
        "gold": float(sampled.gold.mean()),
        "kl": float((sampled.log_probs - sampled.ref_log_probs).mean()),
        "kl_opt": kl_opt,
        "length": float(sampled.responses.lengths.mean()),
        "entropy": sampled.entropy,
    }


def texts(task: TokenTask, sampled: Sampled) -> list[dict[str, Any]]:
    """All samples as prompt, response, proxy and gold reward, by prompt.

    All of them, because they are in the order in which they ended: the first ones are the short ones.
    """
    responses = sampled.responses
    return [
        {
            "prompt": task.text(np.asarray(task.prompts[responses.task_ids[row]])),
            "response": task.text(responses.tokens[row, : responses.lengths[row]]),
            "ended": str(responses.stop_reasons[row]),
            "proxy": float(sampled.proxy[row]),
            "gold": float(sampled.gold[row]),
        }
        for row in np.argsort(responses.task_ids, kind="stable")
    ]


# ------------------------------------------------------------------------------------ by enumeration


def all_responses(task: TokenTask, task_id: int) -> Responses:
    """Every response to a prompt, [(V - 1)^0 + ... + (V - 1)^(h - 1) V rows] with h its limit.

    Those that end by end-of-sequence at each length below h, then all that fill h tokens.
    """
    limit = int(task.limits[task_id])
    letters = np.delete(np.arange(task.vocab_size), task.eos_id)
    parts, lengths = [], []
    for n in range(1, limit + 1):
        last = np.array([task.eos_id]) if n < limit else np.arange(task.vocab_size)
        grid = np.meshgrid(*[letters] * (n - 1), last, indexing="ij")
        tokens = np.stack([axis.reshape(-1) for axis in grid], axis=1)
        parts.append(np.pad(tokens, ((0, 0), (0, limit - n)), constant_values=task.pad))
        lengths.append(np.full(len(tokens), n))
    return task.responses(task_id, np.concatenate(parts), np.concatenate(lengths))


@dataclass(frozen=True)
class Listed:
    """All responses to all prompts, in the order of the prompts, with what is known of each, [K].

    ref: log-probability under the n-gram reference. proxy, gold: rewards.
    """

    task: TokenTask
    responses: Responses
    ref: np.ndarray
    proxy: np.ndarray
    gold: np.ndarray

    def by_prompt(self, values: np.ndarray) -> list[np.ndarray]:
        """[K] split into an array for each prompt."""
        return np.split(values, np.flatnonzero(np.diff(self.responses.task_ids)) + 1)

    def expected(self, log_probs: np.ndarray, values: np.ndarray) -> float:
        """Mean over prompts of the expectation of ``values`` [K] under log-probabilities [K]."""
        terms = np.where(np.isneginf(log_probs), 0.0, np.exp(log_probs) * values)
        return float(terms.sum() / self.task.num_tasks)

    def optimum(self, reward: np.ndarray, beta: float) -> tuple[float, np.ndarray]:
        """The best objective for a reward [K], and the log-probabilities [K] that attain it.

        ``pi* = ref exp(reward / beta) / Z`` and the objective ``beta log Z`` for each prompt; at beta 0
        the highest reward, probability shared among those within 1e-9 of it.
        """
        objectives, policies = [], []
        for ref, r in zip(self.by_prompt(self.ref), self.by_prompt(reward), strict=True):
            if beta == 0.0:
                best = r >= r.max() - 1e-9
                objectives.append(float(r.max()))
                policies.append(np.where(best, -np.log(best.sum()), -np.inf))
                continue
            logits = ref + r / beta
            log_z = float(np.logaddexp.reduce(logits))
            objectives.append(beta * log_z)
            policies.append(logits - log_z)
        return float(np.mean(objectives)), np.concatenate(policies)

    def kl(self, log_p: np.ndarray, log_q: np.ndarray) -> float:
        """KL(p || q) of whole responses, mean over prompts."""
        with np.errstate(invalid="ignore"):
            return self.expected(log_p, log_p - log_q)


def list_all(task: TokenTask, model: RewardModel) -> Listed:
    """Every response of a small task with its rewards and its reference log-probability."""
    parts = [all_responses(task, task_id) for task_id in range(task.num_tasks)]
    names = ("task_ids", "tokens", "lengths", "stop_reasons")
    responses = Responses(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    solution = TokenSolution(task)
    return Listed(
        task=task,
        responses=responses,
        ref=solution.log_probs(solution.reference_policy(), responses).sum(axis=1),
        proxy=LearnedReward(task, model).scores(responses),
        gold=task.score(responses),
    )


def policy_log_probs(listed: Listed, policy: Policy, batch_size: int = 1024) -> np.ndarray:
    """Log-probability float64 [K] of every response under a sequence policy."""
    records = as_records(listed.task, listed.responses)
    with single_thread(), torch.no_grad():
        parts = zip(records.observations.split(batch_size), records.actions.split(batch_size), strict=True)
        return np.concatenate([policy.evaluate(o, a).log_prob.double().sum(1).numpy() for o, a in parts])


def exact_measures(listed: Listed, log_probs: np.ndarray, beta: float) -> dict[str, float | None]:
    """Exact expectations of a policy [K] on a small task.

    As `sampled_measures` (without the entropy), and of the learned reward: ``objective``, the proxy less
    beta KL to the reference, and ``kl_learned``, KL(policy || optimum of the learned reward).
    """
    kl = listed.kl(log_probs, listed.ref)
    proxy = listed.expected(log_probs, listed.proxy)
    found: dict[str, float | None] = {
        "proxy": proxy,
        "gold": listed.expected(log_probs, listed.gold),
        "kl": kl,
        "kl_opt": None,
        "kl_learned": None,
        "length": listed.expected(log_probs, listed.responses.lengths.astype(float)),
        "objective": proxy - beta * kl,
    }
    if beta > 0:
        found["kl_opt"] = listed.kl(log_probs, listed.optimum(listed.gold, beta)[1])
        found["kl_learned"] = listed.kl(log_probs, listed.optimum(listed.proxy, beta)[1])
    return found
