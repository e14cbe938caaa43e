"""What an algorithm asks of a policy, and the choice of one by the environment's spaces."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


class Evaluation(NamedTuple):
    """One fused actor-critic forward: each field [B], differentiable."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


@runtime_checkable
class Policy(Protocol):
    """The interface of every policy; observations and actions are encoded (see `spaces`)."""

    def sample(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions from pi(.|s): int64 [B] or float [B, D]."""

    def mode(self, observations: Tensor) -> Tensor:
        """The most probable actions (the first of ties): int64 [B] or float [B, D]."""

    def evaluate(self, observations: Tensor, actions: Tensor) -> Evaluation:
        """Log-probs of the actions, entropy of pi(.|s) and V(s)."""

    def value(self, observations: Tensor) -> Tensor:
        """V(s): [B]."""


def reads_sequences(policy: Any) -> bool:
    """Whether a policy decodes with a state and is evaluated on whole episodes, as the GPT."""
    return bool(getattr(policy, "reads_sequences", False))


POLICIES = ("auto", "table", "mlp", "gpt")


def make_policy(name: str, env: Any, generator: torch.Generator, **kwargs: Any) -> Any:
    """Build a policy for a vector environment.

    Args:
        name: "table" (needs Discrete observations and actions), "gpt" (needs token ids, see
            `GPTPolicy`), "mlp", or "auto": the first of these that is possible. A table starts at the
            reference where the environment knows it (attribute ``reference_logp`` [S, A] of the
            unwrapped environment), else uniform.
        env: a Gymnasium VectorEnv.
        generator: source of the initial weights.
        kwargs: passed to the policy's constructor.

    Raises:
        ValueError: unknown name, or a table or a GPT for spaces that are not theirs.
    """
    from agents.policies.gpt import GPTPolicy
    from agents.policies.mlp import MLPPolicy
    from agents.policies.spaces import check_spaces, is_token_task
    from agents.policies.table import TablePolicy

    observation_space, action_space = env.single_observation_space, env.single_action_space
    check_spaces(observation_space, action_space)
    if name not in POLICIES:
        raise ValueError(f"policy={name!r} is unknown; allowed: {', '.join(POLICIES)}, or a Policy")
    discrete = isinstance(observation_space, spaces.Discrete) and isinstance(
        action_space, spaces.Discrete
    )
    if name == "table" and not discrete:
        raise ValueError(
            f"policy='table' needs Discrete observations and actions, this environment has "
            f"{observation_space} and {action_space}; use policy='mlp'"
        )
    if name == "gpt" or (name == "auto" and is_token_task(observation_space, action_space)):
        return GPTPolicy(observation_space, action_space, generator, **kwargs)
    if name == "mlp" or not discrete:
        return MLPPolicy(observation_space, action_space, generator, **kwargs)
    reference = find_reference_logp(env)
    return TablePolicy(int(observation_space.n), int(action_space.n), reference, **kwargs)


def find_reference_logp(env: Any) -> np.ndarray | None:
    """``reference_logp`` [S, A] of the environment, looked up through wrappers and sub-environments."""
    unwrapped = env.unwrapped
    table = getattr(unwrapped, "reference_logp", None)
    if table is None and getattr(unwrapped, "envs", None):
        table = getattr(unwrapped.envs[0].unwrapped, "reference_logp", None)
    return None if table is None else np.asarray(table)
