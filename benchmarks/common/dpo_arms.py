"""The runs of `dpo_vs_ppo`: a start that both methods share, then DPO or PPO on the same preferences.

Run functions for `common.runner`: they take a config that is JSON and return numbers. All rewards are in
the unit of `common.rlhf_pipeline`. The reference is the n-gram itself, for DPO and PPO alike: only then is
the exact optimum of the task (`llmgym.token_solution`) the optimum of both.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from agents import fitting
from agents.batch import episode_batch
from agents.collector import Collector
from agents.dpo import DPO, Pairs
from agents.policies.gpt import GPTPolicy
from agents.preference_losses import preference_accuracy
from agents.preferences import Preferences, answer_log_probs
from agents.preferences import Responses as Records
from agents.reward_model import RewardModel, RewardTrainer, reward_model_from
from agents.sft import SFT
from agents.training import make_generator, minibatches, single_thread
from common.memory_measure import peak_bytes, resident_bytes
from common.rlhf_pipeline import (
    ENV,
    as_records,
    as_responses,
    draw_preferences,
    gold_accuracy,
    gold_task,
    learned_task,
    make_policy,
    make_ppo,
    sample_reference,
    train_sft,
)
from llmgym.token_solution import TokenSolution
from llmgym.token_tasks import TokenTask

HELD_OUT_PAIRS = 4_000
NORMALISATION_SAMPLES = 5_000
ROWS = 256  # responses sampled at a time
# Offsets of the seeds of a run, so that no two draws of it are the same.
PAIRS_SEED, HELD_OUT_SEED, NORMALISATION_SEED, MEASURE_SEED = 300_000, 700_000, 600_000, 900_000
MEBIBYTE = 2.0**20


class Cost:
    """Seconds and memory of what happens inside: ``with Cost() as cost: ...``, then `result`.

    ============  ==================================================================================
    wall_seconds  as a clock on the wall sees them; other processes on the same cores lengthen them
    cpu_seconds   of this process
    peak_mib      growth of the process's resident memory from the beginning to its peak inside, in MiB:
                  weights, gradients, moments, data and temporary buffers, but neither the libraries nor
                  what existed before. None where the kernel does not tell (off Linux)
    ============  ==================================================================================
    """

    def __enter__(self) -> Cost:
        self._resident = resident_bytes()
        try:  # the peak of a process counts from here on: workers live on from run to run
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._resident = None
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        peak = peak_bytes()
        growth = None if peak is None or self._resident is None else (peak - self._resident) / MEBIBYTE
        self.result = {"wall_seconds": wall, "cpu_seconds": cpu, "peak_mib": growth}


def warm_up(task: TokenTask) -> None:
    """Two steps of a policy that is thrown away: what libraries allocate at first use is no method's."""
    SFT(make_policy(task, 0), 0, batch_size=128).fit(as_records(task, sample_reference(task, 256, 0)))


def make_start(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the runs of a seed begin with, as ``start.pt``: the SFT policy and PPO's reward model.

    config: seed, beta, sft_samples, pairs, samples (of the measurement).
    """
    task, seed = gold_task(), config["seed"]
    warm_up(task)
    policy = make_policy(task, seed)
    with Cost() as sft_cost:
        sft = train_sft(task, policy, config["sft_samples"], seed, learning_rate="lin_0.003", batch_size=64)
    preferences = draw_preferences(task, config["pairs"], seed + PAIRS_SEED)
    model = reward_model_from(policy, seed)
    with Cost() as cost:
        trainer = RewardTrainer(model, seed, learning_rate="lin_0.001", batch_size=64, n_epochs=2)
        trainer.fit(preferences)
        samples = sample_reference(task, NORMALISATION_SAMPLES, seed + NORMALISATION_SEED)
        model.normalise(as_records(task, samples))
    # Only the mean stays: in the scores' own unit a difference of 1 is one nat of preference, as in DPO.
    deviation = float(model.deviation)
    model.deviation.fill_(1.0)
    torch.save({"policy": policy.state_dict(), "model": model.state_dict()}, folder / "start.pt")

    held_out = draw_preferences(task, HELD_OUT_PAIRS, seed + HELD_OUT_SEED)
    return measure(task, policy, config) | {
        "sft": sft,
        "sft_cost": sft_cost.result,
        "model_accuracy": trainer.evaluate(held_out)["rm/accuracy"],
        "gold_accuracy": gold_accuracy(task, held_out),
        "model_deviation": deviation,
        "model_cost": cost.result,
    }


def load_start(task: TokenTask, config: dict[str, Any], folder: Path) -> tuple[GPTPolicy, RewardModel]:
    """The SFT policy and the reward model of the run ``config["start"]``, a folder beside this run's."""
    warm_up(task)
    path = folder.parent.parent / config["start"] / "start.pt"
    state = torch.load(path, weights_only=True)
    policy = make_policy(task, config["seed"])
    model = reward_model_from(policy, config["seed"])
    policy.load_state_dict(state["policy"])
    model.load_state_dict(state["model"])
    return policy, model


def train_dpo(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """DPO on the preferences, from the SFT policy.

    config: as of `make_start`; start; learning_rate (falls linearly to 0), n_epochs.
    """
    task = gold_task()
    policy, _ = load_start(task, config, folder)
    preferences = draw_preferences(task, config["pairs"], config["seed"] + PAIRS_SEED)
    env = gym.make(ENV, task=task)
    with Cost() as cost:
        agent = DPO(
            env, config["seed"], policy=policy, beta=config["beta"], batch_size=64,
            learning_rate=f"lin_{config['learning_rate']}", n_epochs=config["n_epochs"],
        )  # fmt: skip
        pairs = with_reference(task, preferences)
        fitting.fit(pairs, agent.loss, agent.optimizer, agent.config, agent.generator)
    env.close()
    return measure(task, policy, config) | {"cost": cost.result}


def train_ppo(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """PPO on the reward model of the same preferences, from the SFT policy.

    config: as of `train_dpo`, but that the epochs are those of each rollout; steps, tokens to sample.
    """
    task = gold_task()
    policy, model = load_start(task, config, folder)
    with Cost() as cost:
        agent = make_ppo(
            learned_task(task, model), policy, config["seed"], model, beta=config["beta"], batch_size=32,
            learning_rate=f"lin_{config['learning_rate']}", n_epochs=config["n_epochs"],
        )  # fmt: skip
        agent.learn(config["steps"])
    agent.env.close()
    return measure(task, agent.policy, config) | {"cost": cost.result, "steps": agent.num_timesteps}


def with_reference(task: TokenTask, preferences: Preferences) -> Pairs:
    """The preferences with the log-probs of the n-gram reference, exact to float32."""
    return Pairs(
        preferences, reference_log_probs(task, preferences.chosen),
        reference_log_probs(task, preferences.rejected),
    )  # fmt: skip


def reference_log_probs(task: TokenTask, records: Records) -> Tensor:
    """Log-prob of each whole response under the task's reference, float32 [B]."""
    solution = TokenSolution(task)
    responses = as_responses(task, records.observations.numpy(), records.actions.numpy())
    log_probs = solution.log_probs(solution.reference_policy(), responses).sum(axis=1)
    return torch.from_numpy(log_probs).float()


def measure(task: TokenTask, policy: Any, config: dict[str, Any]) -> dict[str, float]:
    """A policy by its responses to the prompts in turn, and by held-out preferences.

    =========  =====================================================================================
    accuracy   share of held-out preferences whose chosen answer has the higher implicit reward
               ``log pi(y|x) - log ref(y|x)``
    gold       mean gold reward
    kl         KL(policy || reference) of whole responses, in nats
    objective  gold - beta kl
    kl_opt     KL(policy || exact optimum at beta), in nats
    kl_opt_se  standard error of kl_opt, from the sampled responses
    length     tokens
    =========  =====================================================================================
    """
    beta, seed = config["beta"], config["seed"]
    solution = TokenSolution(task)
    env = gym.make_vec(ENV, num_envs=ROWS, task=task, autoreset_mode="disabled")
    collector = Collector(env, policy, make_generator(seed + MEASURE_SEED), seed + MEASURE_SEED)
    task_ids = np.arange(config["samples"]) % task.num_tasks
    with single_thread():
        rollout = collector.collect_tasks(task_ids, np.full(len(task_ids), -1))
    env.close()
    nothing = torch.zeros_like(rollout.rewards)
    batch = episode_batch(rollout, nothing, nothing)
    responses = as_responses(task, batch.observations.numpy(), batch.actions.numpy())
    log_probs = batch.old_log_probs.double().sum(1).numpy()
    reference, optimum = (
        solution.log_probs(table, responses).sum(axis=1)
        for table in (solution.reference_policy(), solution.optimal_policy(beta))
    )
    gold, kl = float(task.score(responses).mean()), float((log_probs - reference).mean())
    held_out = with_reference(task, draw_preferences(task, HELD_OUT_PAIRS, seed + HELD_OUT_SEED))
    return {
        "accuracy": implicit_accuracy(policy, held_out),
        "gold": gold,
        "kl": kl,
        "objective": gold - beta * kl,
        "kl_opt": float((log_probs - optimum).mean()),
        "kl_opt_se": float((log_probs - optimum).std() / np.sqrt(len(task_ids))),
        "length": float(responses.lengths.mean()),
    }


def implicit_accuracy(policy: Any, pairs: Pairs) -> float:
    """Share of the pairs in which ``log pi - log ref`` of the chosen answer is the higher one."""
    total = 0.0
    with single_thread(), torch.no_grad():
        for part in minibatches(pairs, ROWS, None):
            given = part.preferences
            chosen = answer_log_probs(policy, given.chosen) - part.ref_chosen
            rejected = answer_log_probs(policy, given.rejected) - part.ref_rejected
            total += float(preference_accuracy(chosen - rejected, given.labels).sum())
    return total / len(pairs)
