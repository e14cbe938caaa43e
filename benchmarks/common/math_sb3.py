"""Stable-Baselines3's PPO on arithmetic: cloned from the same solved problems, then trained."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from stable_baselines3.common.callbacks import BaseCallback

import agents
from agents.preferences import Responses
from agents.sb3_tokens import TokenFeatures
from common import math_measure as measure
from common.math_arms import Arm

NETWORK = {"features_extractor_class": TokenFeatures, "net_arch": [128, 128],
           "features_extractor_kwargs": {"n_embd": 32, "n_last": 10}}  # fmt: skip
CLONING_EPOCHS = 200


class Count(BaseCallback):
    """Stops after so many completions, and measures on the way."""

    def __init__(self, completions: int, validation: VectorEnv, evaluations: int) -> None:
        super().__init__()
        self.completions, self.validation, self.evaluations = completions, validation, evaluations
        self.done, self.points, self.seconds = 0, [], 0.0  # type: ignore[var-annotated]
        self.since = time.process_time()

    def look(self) -> None:
        """Add a point of the learning curve."""
        self.seconds += time.process_time() - self.since
        found = measure.accuracy(answer_with(self.model), self.validation)
        self.points.append({"completions": self.done, "seconds": self.seconds, "accuracy": found})
        self.since = time.process_time()

    def _on_step(self) -> bool:
        before = self.done
        self.done += int(self.locals["dones"].sum())
        part = self.completions / self.evaluations
        if self.done // part > before // part:
            self.look()
        return self.done < self.completions


def answer_with(model: Any) -> measure.Answer:
    """Answers of an SB3 model."""

    def answer(env: VectorEnv, task_ids: np.ndarray, greedy: bool, seed: int) -> measure.Answers:
        parts = []
        for first in range(0, len(task_ids), env.num_envs):
            ids = task_ids[first : first + env.num_envs]
            rows = np.pad(ids, (0, env.num_envs - len(ids)), mode="edge")
            observations, _ = env.reset(seed=seed, options={"task_id": rows})
            found = {key: np.zeros(env.num_envs) for key in ("correct", "lenient", "length", "cut")}
            ended = np.zeros(env.num_envs, bool)
            while not ended.all():
                actions, _ = model.predict(observations, deterministic=greedy)
                observations, _, terminated, _, info = env.step(actions)
                now = terminated & ~ended
                if now.any():
                    found["correct"][now] = info["correct"][now]
                    found["lenient"][now] = info["reward/lenient"][now]
                    found["length"][now] = info["response_length"][now]
                    found["cut"][now] = info["stop_reason"][now] == "length"
                ended |= terminated
            parts.append({key: values[: len(ids)] for key, values in found.items()})
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    return answer


def steps_of(data: Responses, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every step of some answers: what was seen, [S, L], and the token that followed, [S]."""
    seen, tokens = [], []
    for row, actions in zip(data.observations, data.actions, strict=True):
        n, filled = int((actions >= 0).sum()), int((row != pad).sum())
        for t in range(n):
            prefix = row.clone()
            prefix[filled - n + 1 + t :] = pad
            seen.append(prefix)
            tokens.append(actions[t])
    return torch.stack(seen), torch.stack(tokens)


def clone(model: Any, data: Responses, pad: int, seed: int) -> None:
    """Maximum likelihood of the solutions, the fine-tuning of a policy that is no GPT."""
    seen, tokens = steps_of(data, pad)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.policy.parameters(), lr=1e-3)
    for _ in range(CLONING_EPOCHS):
        for index in torch.randperm(len(tokens), generator=generator).split(256):
            loss = -model.policy.evaluate_actions(seen[index], tokens[index])[1].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_sb3(
    arm: Arm, env: VectorEnv, data: Responses, validation: VectorEnv, held_out: VectorEnv,
    config: dict[str, Any], completions: int,
) -> dict[str, Any]:  # fmt: skip
    """Clone, train and measure SB3's PPO. Its last weights are measured: they are also its best, or near."""
    seed = config["seed"]
    model: Any = agents.make(arm.agent, env, seed=seed, policy_kwargs=NETWORK, **arm.config)
    clone(model, data, env.unwrapped.task.pad, seed)
    count = Count(completions, validation, 25)
    count.init_callback(model)
    count.look()
    model.learn(4 * completions, callback=count)  # a sum has at most four tokens: the rate falls to near 0
    found = measure.measure(answer_with(model), held_out, config["problems"], config["samples"], seed)
    return {**found, "last_accuracy": found["accuracy"], "seconds": count.seconds, "curve": count.points}
