"""The runs of the RLHF benchmark: the stages before PPO once a seed, PPO for each arm, and its alarms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.policies.gpt import GPTPolicy
from agents.reward_model import RewardModel, reward_model_from
from common.files import write_json
from common.rlhf_measure import (
    exact_measures,
    list_all,
    policy_log_probs,
    sample_policy,
    sampled_measures,
    texts,
)
from common.rlhf_pipeline import (
    draw_preferences,
    gold_task,
    learned_task,
    make_policy,
    make_ppo,
    small_task,
    train_reward_model,
    train_sft,
)
from llmgym.token_solution import TokenSolution
from llmgym.token_tasks import TokenTask

TASKS = {"large": gold_task, "small": small_task}
TEXTS = 8  # samples kept as text: one for each prompt of the large task
EVALUATION_SAMPLES = 256

# Alarms. KL (nats and share) and length (share) that both rose within so many evaluations; and updates
# in a row with more than this share of ratios outside the clip range.
ALARM_EVALUATIONS, ALARM_KL, ALARM_KL_SHARE, ALARM_LENGTH_SHARE = 4, 1.0, 0.25, 0.1
ALARM_UPDATES, ALARM_CLIP_FRACTION = 10, 0.3

Curve = list[dict[str, Any]]


def prepare(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """SFT, preferences and reward model of one seed; weights go to the folder. For ``run_jobs``."""
    task, seed = TASKS[config["size"]](), config["seed"]
    policy = make_policy(task, seed, **config["policy"])
    sft = train_sft(task, policy, config["sft_samples"], seed, **config["sft"])
    preferences = draw_preferences(task, config["pairs"], seed)
    model, report = train_reward_model(task, policy, preferences, seed, **config["reward_model"])
    torch.save(policy.state_dict(), folder / "sft.pt")
    torch.save(model.state_dict(), folder / "reward_model.pt")
    return {"sft": sft, "reward_model": report._asdict()}


def load_prepared(task: TokenTask, config: dict[str, Any], folder: Path) -> tuple[GPTPolicy, RewardModel]:
    """The SFT policy and the reward model that `prepare` left in a folder."""
    policy = make_policy(task, config["seed"], **config["policy"])
    policy.load_state_dict(torch.load(folder / "sft.pt", weights_only=True))
    model = reward_model_from(policy, config["seed"])
    model.load_state_dict(torch.load(folder / "reward_model.pt", weights_only=True))
    return policy, model


def train(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """PPO from the SFT policy; what it is worth at even intervals, and samples. For ``run_jobs``.

    Returns:
        ``curve``, a record for each evaluation (``step`` and the measures of `sampled_measures`, on the
        small task those of `exact_measures`); ``updates``, the agent's own metrics of each update;
        ``alarms``; ``before`` and ``after``, samples as text.
    """
    size, seed, beta = config["size"], config["seed"], config["beta"]
    task = TASKS[size]()
    solution = TokenSolution(task)
    policy, model = load_prepared(task, config["prepare"], folder.parents[1] / config["prepared"])
    target = learned_task(task, model) if config["reward"] == "learned" else task
    reference = policy if config["reference"] == "sft" else None
    agent = make_ppo(task=target, policy=policy, seed=seed, model=model, reference=reference, beta=beta,
                     **config["ppo"])  # fmt: skip
    listed = list_all(task, model) if size == "small" else None
    curve: Curve = []

    def evaluate() -> None:
        sampled = sample_policy(task, model, agent.policy, EVALUATION_SAMPLES, seed + 1_000 * len(curve))
        found = sampled_measures(solution, sampled, beta)
        if listed is not None:
            found |= exact_measures(listed, policy_log_probs(listed, agent.policy), beta)
        curve.append({"step": agent.num_timesteps, **found})

    def at_intervals(agent: Any) -> None:
        if agent.num_timesteps >= len(curve) * config["steps"] / config["evaluations"]:
            evaluate()

    before = sample_policy(task, model, policy, TEXTS, seed)
    evaluate()
    shutil.rmtree(folder / "ppo", ignore_errors=True)  # of a run that was stopped
    agent.learn(config["steps"], run_dir=folder / "ppo", callback=at_intervals)
    if curve[-1]["step"] < agent.num_timesteps:
        evaluate()
    updates = read_updates(folder / "ppo" / "metrics.jsonl")
    agent.save(folder / "agent")
    result = {
        "curve": curve,
        "updates": updates,
        "alarms": alarms(curve, [update["clip_fraction"] for update in updates]),
        "before": texts(task, before),
        "after": texts(task, sample_policy(task, model, agent.policy, TEXTS, seed)),
    }
    write_json(folder / "curve.json", curve)
    return result


def read_updates(path: Path) -> Curve:
    """Step, clip fraction and value loss of each update, from the agent's metrics."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {"step": line["step"]} | {key: line[f"train/{key}"] for key in ("clip_fraction", "value_loss")}
        for line in lines
    ]


def alarms(curve: Sequence[dict[str, Any]], clip_fractions: Sequence[float]) -> list[str]:
    """A line for the first time that each sign of trouble is seen; none is a clean run.

    Args:
        curve: evaluations with ``step``, ``kl`` and ``length``.
        clip_fractions: of each update.
    """
    lines = []
    for start in range(len(curve) - ALARM_EVALUATIONS + 1):
        a, b = curve[start], curve[start + ALARM_EVALUATIONS - 1]
        climbs = b["kl"] - a["kl"] > max(ALARM_KL, ALARM_KL_SHARE * a["kl"])
        if climbs and b["length"] > (1.0 + ALARM_LENGTH_SHARE) * a["length"]:
            lines.append(
                f"KL and length climb together between steps {a['step']:,} and {b['step']:,}: KL "
                f"{a['kl']:.1f} to {b['kl']:.1f}, length {a['length']:.1f} to {b['length']:.1f}"
            )
            break
    above = np.asarray(clip_fractions) > ALARM_CLIP_FRACTION
    for start in range(len(above) - ALARM_UPDATES + 1):
        if above[start : start + ALARM_UPDATES].all():
            lines.append(
                f"the clip fraction stays above {ALARM_CLIP_FRACTION} for {ALARM_UPDATES} updates, from "
                f"update {start + 1}"
            )
            break
    return lines
