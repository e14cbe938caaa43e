"""The runs of the mathematics benchmark: which trainer, on which problems, paid by which verifier.

Every arm starts from the same weights, those of a GPT fine-tuned on a small set of solved problems, and has
the same number of completions. Rollouts have 256 completions and two gradient steps; REINFORCE and RLOO,
which take one step on fresh samples, have rollouts of 128 instead, so that all take as many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agents import presets

ROLLOUT = 256  # completions between two collections, for two gradient steps
MAX_NEW_TOKENS = 8  # twice what the longest sum needs with end-of-sequence: room for a cheat, and for length
POLICY: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 64}
LEARNING_RATE = "lin_5e-4"  # falling to 0: at a constant 5e-4 accuracy went up and down by 20 points
# SFT examples for one completion of GRPO, which is read twice and trained on twice. Training is 3 passes.
SFT_EXAMPLES = 8 / 3


@dataclass(frozen=True)
class Arm:
    """One line of the tables.

    ==========  ===================================================================================
    name        also the name of its folder
    title       in tables and legends
    kind        "rl": ``agents.make(agent)``; "sft": more fine-tuning; "sb3"; "dpo": on verified pairs
    agent       of "rl" and "sb3", a name for `agents.make`
    config      its configuration, or SFT's
    problems    "train": all problems of the split; "sft": those that the start was fine-tuned on
    verifier    which one pays
    share       of the completions of a run
    start       the arm it starts from; None: the fine-tuned GPT
    ==========  ===================================================================================
    """

    name: str
    title: str
    kind: str = "rl"
    agent: str = "grpo"
    config: dict[str, Any] = field(default_factory=dict)
    problems: str = "train"
    verifier: str = "strict"
    share: float = 1.0
    start: str | None = None


def grpo_config(group_size: int) -> dict[str, Any]:
    """GRPO with the group's deviation and the token mean, at equal completions."""
    return {"learning_rate": LEARNING_RATE, "num_generations": group_size,
            "n_groups": ROLLOUT // group_size, "num_iterations": 2}  # fmt: skip


def preset_config(name: str) -> dict[str, Any]:
    """A preset's switches on the sizes of this benchmark: two minibatches of each rollout, read once."""
    sizes = grpo_config(8) | {"num_iterations": 1, "batch_size": ROLLOUT // 2}
    return sizes | {"max_completion_length": MAX_NEW_TOKENS} | presets.preset(name)


ONE_STEP = {"learning_rate": LEARNING_RATE, "max_grad_norm": 1.0}
PPO_CONFIG = {"learning_rate": LEARNING_RATE, "gamma": 1.0, "max_grad_norm": 1.0}
GRPO_8 = Arm("grpo-8", "GRPO, groups of 8", config=grpo_config(8))
ARMS = {
    arm.name: arm
    for arm in (
        GRPO_8,
        *(Arm(f"grpo-{g}", f"GRPO, groups of {g}", config=grpo_config(g)) for g in (2, 4, 16)),
        Arm("sft", "SFT continued", "sft"),
        Arm("reinforce", "REINFORCE, batch mean", agent="reinforce",
            config=ONE_STEP | {"gamma": 1.0, "baseline": "batch_mean"}),
        Arm("rloo", "RLOO, groups of 8", agent="rloo",
            config=ONE_STEP | {"num_generations": 8, "n_groups": ROLLOUT // 16}),
        Arm("ppo", "PPO", agent="ppo",
            config=PPO_CONFIG | {"n_episodes": 1, "batch_size": ROLLOUT, "n_epochs": 2}),
        Arm("sb3-ppo", "SB3's PPO, its own network", "sb3", "sb3:PPO",
            PPO_CONFIG | {"n_steps": 16, "batch_size": 256, "n_epochs": 4}),
        Arm("grpo-own", "GRPO on the SFT problems only", config=grpo_config(8), problems="sft"),
        Arm("sft-all", "SFT on all train problems", "sft", problems="train"),
        Arm("lenient", "GRPO, lenient verifier", config=grpo_config(8), verifier="lenient"),
        Arm("chain-grpo", "SFT - GRPO, a quarter", config=grpo_config(8), share=0.25),
        Arm("chain-dpo", "SFT - GRPO - DPO", "dpo", "dpo",
            {"learning_rate": 1e-4, "n_epochs": 4, "batch_size": 64}, share=0.125, start="chain-grpo"),
    )
}  # fmt: skip
PARTS: dict[str, tuple[str, ...]] = {
    "main": ("grpo-8", "sft"),
    "groups": ("grpo-2", "grpo-4", "grpo-8", "grpo-16"),
    "baselines": ("grpo-8", "sft", "rloo", "reinforce", "ppo", "sb3-ppo"),
    "controls": ("grpo-8", "grpo-own", "sft-all"),
    "probes": ("grpo-8", "lenient"),
    "chain": ("chain-grpo", "chain-dpo"),
}


def find_arm(name: str) -> Arm:
    """An arm by its name; "preset-NAME" is GRPO with the switches of a preset."""
    if name.startswith("preset-"):
        preset = name.removeprefix("preset-")
        return Arm(name, f"preset {preset}", config=preset_config(preset))
    return ARMS[name]


def chosen_arms(parts: Sequence[str], preset_names: Sequence[str]) -> list[Arm]:
    """The arms of some parts, each once, and those of the presets."""
    names = [name for part in parts for name in PARTS[part]]
    return [find_arm(n) for n in dict.fromkeys([*names, *(f"preset-{p}" for p in preset_names)])]
