"""Named combinations of GRPO's switches, each reproducing what one source does.

    agents.make("grpo", env, **presets.preset("dapo"), learning_rate=1e-3)

A preset holds the choices that define an algorithm, not sizes or step sizes: those belong to a model and
a machine. What it was read from, and whether that source's own code is compared with ours by a test, is
in `PRESETS`. "tested" means the loss and its gradient on one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmgym.checks import did_you_mean


@dataclass(frozen=True)
class Preset:
    """Switches of `agents.grpo.GRPOConfig`, and where they are from."""

    source: str
    tested: str
    config: dict[str, Any] = field(default_factory=dict)


NOT_TESTED = "read from source, not tested against it"

PRESETS: dict[str, Preset] = {
    "deepseekmath": Preset(
        "Shao et al., DeepSeekMath (arXiv 2402.03300v3), eq. 3 and 4, section 4.2: beta 0.04, one step per "
        "rollout, where every ratio is 1 and the clip range (which it does not state) has no effect. Nor "
        "does it say which standard deviation: here the sample one, which is torch.std's, plus 1e-4",
        "against TRL's loss_type='grpo' with the same beta",
        {"scale_rewards": "group", "loss_type": "grpo", "epsilon": 0.2, "beta": 0.04, "kl_in": "loss",
         "kl_estimator": "k3", "num_iterations": 1},
    ),
    "trl": Preset(
        "TRL 1.16.0, GRPOConfig's defaults",
        "against TRL",
        {"scale_rewards": "group", "std": "sample", "std_eps": 1e-4, "loss_type": "dapo", "epsilon": 0.2,
         "beta": 0.0, "kl_in": "loss", "kl_estimator": "k3", "use_bias_correction_kl": True,
         "num_iterations": 1},
    ),
    "dr-grpo": Preset(
        "Liu et al., Understanding R1-Zero-Like Training (arXiv 2503.20783v2), section 3.2: no deviation, "
        "sums divided by a constant. Give max_completion_length",
        "against TRL's loss_type='dr_grpo' with scale_rewards='none'",
        {"scale_rewards": "none", "loss_type": "dr_grpo", "epsilon": 0.2, "beta": 0.0},
    ),
    "dapo": Preset(
        "Yu et al., DAPO (arXiv 2503.14476v2), eq. 8 to 12 and section 4.1: clip-higher 0.2 and 0.28, "
        "dynamic sampling, token mean (of a group in eq. 8; of a batch in its code, and here), no KL, "
        "overlong filtering (its soft length penalty is part of a reward, and so the environment's matter)",
        "the loss against TRL's loss_type='dapo'",
        {"scale_rewards": "group", "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0,
         "dynamic_sampling": True, "mask_truncated_completions": True},
    ),
    "gspo": Preset(
        "Zheng et al., Group Sequence Policy Optimization (arXiv 2507.18071v2), eq. 5 to 7 and section 5.1: "
        "clip 3e-4 and 4e-4 on the ratio of whole sequences",
        "against TRL's importance_sampling_level='sequence' with loss_type='grpo'",
        {"scale_rewards": "group", "loss_type": "grpo", "importance_sampling_level": "sequence",
         "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0},
    ),
    "verl": Preset(
        "verl, main branch at commit 018f23b5 (verl/trainer/ppo/core_algos.py, "
        "verl/trainer/config/actor/actor.yaml) with what its docs/algo/grpo.md sets for GRPO: sample "
        "deviation plus 1e-6, token mean over each minibatch, dual clip at 3, k3 in the loss with 0.001. "
        "Not here: its bounds of the log-ratio (20) and of the KL of a step (10)",
        NOT_TESTED,
        {"scale_rewards": "group", "std": "sample", "std_eps": 1e-6, "loss_type": "bnpo", "epsilon": 0.2,
         "delta": 3.0, "beta": 0.001, "kl_in": "loss", "kl_estimator": "k3", "num_iterations": 1},
    ),
    "openrlhf": Preset(
        "OpenRLHF, main branch at commits f5b3f08a (openrlhf/models/loss.py, openrlhf/cli/train_ppo_ray.py) "
        "and 89308a0b (openrlhf/trainer/ppo_utils/experience_maker.py), advantage_estimator=group_norm with "
        "use_kl_loss and k3 as in its script for GRPO, init_kl_coef left at 0.01: sample deviation plus "
        "1e-9, token mean over each minibatch, no dual clip. Not here: rewards bounded to -10 and 10",
        NOT_TESTED,
        {"scale_rewards": "group", "std": "sample", "std_eps": 1e-9, "loss_type": "bnpo", "epsilon": 0.2,
         "beta": 0.01, "kl_in": "loss", "kl_estimator": "k3", "num_iterations": 1},
    ),
}


def names() -> list[str]:
    """The presets, sorted."""
    return sorted(PRESETS)


def preset(name: str) -> dict[str, Any]:
    """Configuration fields of a preset, for ``agents.make("grpo", env, **preset(name), ...)``.

    Raises:
        ValueError: unknown name, with the nearest one.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, names(), "", " ")
        raise ValueError(f"preset={name!r} is unknown; {hint}allowed: {', '.join(names())}")
    return dict(PRESETS[name].config)
