"""The runs of the mathematics benchmark: fine-tuning once a seed, then every arm from its weights.

A run's folder holds `agent.pt`, the weights that did best on the validation problems. A run starts from such
a file of another run, whichever trainer wrote it (`config["init"]`): that is how trainers are chained.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import agents
from agents.batch import episode_batch
from agents.checkpoint import load_weights, read_state, write_state
from agents.dpo import DPO
from agents.groups import collect_groups, group_ids
from agents.policies.gpt import GPTPolicy
from agents.preferences import Preferences, Responses, make_preferences
from agents.rollout import Rollout
from agents.sft import SFT
from agents.training import make_generator
from common import math_measure as measure
from common.math_arms import POLICY, ROLLOUT, SFT_EXAMPLES, Arm, find_arm

SFT_CONFIG = {"learning_rate": 1e-3, "batch_size": 64}
SFT_CHECK = 5  # epochs between two looks at the validation problems
SFT_MOST = 60  # such looks; a set too small to reach the accuracy asked for ends there
EVALUATIONS = 25  # points of a learning curve


class Curve:
    """Validation accuracy over a run, the CPU seconds of training without it, and the best weights."""

    def __init__(self, policy: Any, validation: Any) -> None:
        self.policy, self.validation = policy, validation
        self.points: list[dict[str, float]] = []
        self.best = -1.0
        self.weights: dict[str, Any] = {}
        self.seconds, self._since = 0.0, time.process_time()

    def add(self, completions: int, **metrics: float) -> float:
        """Measure the policy; returns its accuracy."""
        self.seconds += time.process_time() - self._since
        found = measure.accuracy(measure.answer_with(self.policy), self.validation)
        point = {"completions": completions, "seconds": self.seconds, "accuracy": found}
        self.points.append({**point, **metrics})
        if found > self.best:
            self.best, self.weights = found, copy.deepcopy(self.policy.state_dict())
        self._since = time.process_time()
        return found


def new_policy(env: Any, seed: int) -> GPTPolicy:
    """A GPT with random weights for the environment."""
    spaces = env.single_observation_space, env.single_action_space
    return GPTPolicy(*spaces, make_generator(seed), **POLICY)


def splits(config: dict[str, Any]) -> tuple[Any, Any]:
    """Environments of the validation and of the held-out problems."""
    return tuple(  # type: ignore[return-value]
        measure.make_env(measure.ROWS, config["task"], split, seed=config["seed"])
        for split in ("validation", "held_out")
    )


def finish(config: dict[str, Any], folder: Path, curve: Curve, held_out: Any, **more: Any) -> dict[str, Any]:
    """Measure the last and the best weights on the held-out problems, and save the best."""
    last = measure.accuracy(measure.answer_with(curve.policy), held_out)
    curve.policy.load_state_dict(curve.weights)
    found = measure.measure(measure.answer_with(curve.policy), held_out, config["problems"],
                            config["samples"], config["seed"])  # fmt: skip
    write_state(folder / "agent.pt", {"algorithm": config["arm"], "policy": curve.weights})
    return {**found, "last_accuracy": last, "seconds": curve.seconds, "curve": curve.points, **more}


def start_job(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fine-tune a GPT on a few solved problems until it solves so much of the validation problems."""
    seed = config["seed"]
    env = measure.make_env(1, config["task"], n_train=config["n_train"], seed=seed)
    validation, held_out = splits(config)
    policy = new_policy(env, seed)
    trainer = SFT(policy, seed, n_epochs=SFT_CHECK, **SFT_CONFIG)
    data, curve = measure.demonstrations(env), Curve(policy, validation)
    for look in range(1, SFT_MOST + 1):
        trainer.fit(data)
        if curve.add(0, epochs=look * SFT_CHECK) >= config["start_accuracy"]:
            break
    return finish(config, folder, curve, held_out, epochs=look * SFT_CHECK)


def arm_job(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one arm and measure it; `config` as `grpo_math.arm_jobs` makes it."""
    arm, seed = find_arm(config["arm"]), config["seed"]
    validation, held_out = splits(config)
    n_train = config["n_train"] if arm.problems == "sft" or arm.name == "sft" else None
    completions = int(config["completions"] * arm.share)
    if arm.kind == "sb3":
        from common.math_sb3 import train_sb3  # here: SB3 takes seconds to import

        few = measure.make_env(1, config["task"], n_train=config["n_train"], seed=seed)
        env = measure.make_env(64, config["task"], seed=seed, autoreset="next_step")
        return train_sb3(arm, env, measure.demonstrations(few), validation, held_out, config, completions)
    rows = ROLLOUT // 2 if arm.agent in ("reinforce", "rloo") else ROLLOUT  # REINFORCE: one episode a row
    env = measure.make_env(rows, config["task"], n_train=n_train, verifier=arm.verifier, seed=seed)
    policy = new_policy(env, seed)
    load_weights(_Holder(policy), read_state(init_path(config, folder)), str(folder))
    curve = Curve(policy, validation)
    curve.add(0)
    if arm.kind == "sft":
        more_sft(policy, env, curve, completions, seed)
    elif arm.kind == "dpo":
        train_dpo(arm, policy, env, curve, completions, seed)
    else:
        train_rl(arm, policy, env, curve, completions, seed)
    return finish(config, folder, curve, held_out)


class _Holder:
    """What `load_weights` asks of an agent."""

    def __init__(self, policy: GPTPolicy) -> None:
        self.policy = policy


def init_path(config: dict[str, Any], folder: Path) -> Path:
    """The weights a run starts from; a relative `init` is beside the runs of the same benchmark."""
    return folder.parent.parent / config["init"] / f"seed-{config['seed']}" / "agent.pt"


def every(total: int) -> Callable[[int], bool]:
    """Whether a count has passed the next of `EVALUATIONS` equal parts of the total."""
    seen = 0

    def passed(done: int) -> bool:
        nonlocal seen
        before, seen = seen, done * EVALUATIONS // total
        return seen > before

    return passed


def more_sft(policy: GPTPolicy, env: Any, curve: Curve, completions: int, seed: int) -> None:
    """Fine-tune on, for as many passes through the network as GRPO's on so many completions."""
    data, due, done = measure.demonstrations(env), every(completions), 0.0
    trainer = SFT(policy, seed, **SFT_CONFIG)
    while done < completions:
        loss = trainer.fit(data)[-1]["sft/loss"]
        done += len(data) / SFT_EXAMPLES
        if due(int(done)):
            curve.add(int(done), loss=loss)


def train_rl(arm: Arm, policy: GPTPolicy, env: Any, curve: Curve, completions: int, seed: int) -> None:
    """Any of our on-policy agents, for so many completions."""
    reference = copy.deepcopy(policy) if arm.config.get("beta") else None
    agent = agents.make(arm.agent, env, seed=seed, reference=reference, policy=policy, **arm.config)
    due, done, seen = every(completions), 0, []
    while done < completions:
        rollout = agent.collect()
        agent.num_timesteps += rollout.env_steps
        metrics = agent.update(rollout, 1.0 - done / completions)
        done += len(rollout.episodes.returns)
        seen.append(watched(rollout, metrics))
        if due(done):
            curve.add(done, **{k: _mean([s[k] for s in seen]) for k in seen[0]})
            seen = []


def watched(rollout: Rollout, metrics: dict[str, float]) -> dict[str, float]:
    """What a learning curve keeps of a rollout and its update; NaN where there is nothing to average."""
    found = measure.of_episodes(rollout.episodes)
    right = found["correct"] > 0.5
    return {
        "reward": float(rollout.episodes.returns.mean()),
        "pass_rate": float(right.mean()),
        "length_right": float(found["length"][right].mean()) if right.any() else np.nan,
        "length_wrong": float(found["length"][~right].mean()) if not right.all() else np.nan,
        "no_signal": metrics.get("group/no_signal", np.nan),
        "entropy": metrics.get("train/entropy", np.nan),
    }


def _mean(values: list[float]) -> float:
    known = [v for v in values if np.isfinite(v)]
    return float(np.mean(known)) if known else float("nan")


def train_dpo(arm: Arm, policy: GPTPolicy, env: Any, curve: Curve, completions: int, seed: int) -> None:
    """DPO on pairs of a right and a wrong answer, sampled from the policy as it starts."""
    agent = DPO(env, seed=seed, policy=policy, **arm.config)
    agent.frozen_reference()
    rollout = collect_groups(agent.collector, completions // 2, 2)
    pairs = verified_pairs(rollout)
    if pairs is not None:
        agent.fit(pairs)
    curve.add(completions, pairs=0 if pairs is None else len(pairs))


def verified_pairs(rollout: Rollout) -> Preferences | None:
    """Of groups of two, those in which one answer has the higher reward; None where there are none."""
    nothing = torch.zeros_like(rollout.rewards)
    batch = episode_batch(rollout, nothing, nothing)
    answers = Responses(batch.observations, batch.actions)
    pairs = torch.argsort(group_ids(rollout), stable=True).view(-1, 2)
    rewards = torch.from_numpy(rollout.episodes.returns)[pairs]
    differ = rewards[:, 0] != rewards[:, 1]
    if not differ.any():
        return None
    pairs, better = pairs[differ], rewards[differ].argmax(1, keepdim=True)
    chosen, rejected = pairs.gather(1, better).squeeze(1), pairs.gather(1, 1 - better).squeeze(1)
    return make_preferences(answers.select(chosen), answers.select(rejected))
