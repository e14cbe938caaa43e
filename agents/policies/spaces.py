"""Between Gymnasium's spaces and the tensors of a policy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


def check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Raise ValueError for a space that the policies of this package cannot serve."""
    if not isinstance(observation_space, spaces.Box | spaces.Discrete | spaces.MultiBinary):
        raise ValueError(
            f"observation_space={observation_space} is not supported; allowed: Box, Discrete, "
            "MultiBinary (flatten others with gymnasium.wrappers.FlattenObservation)"
        )
    if not isinstance(action_space, spaces.Discrete | spaces.Box):
        raise ValueError(f"action_space={action_space} is not supported; allowed: Discrete, Box")
    if isinstance(action_space, spaces.Box) and (
        len(action_space.shape) != 1 or not np.issubdtype(action_space.dtype, np.floating)
    ):
        raise ValueError(
            f"action_space={action_space} is not supported; a Box must have shape [D] and a float dtype"
        )


def flat_size(space: spaces.Space) -> int:
    """Length of a sample as a flat float vector (a Discrete one is one-hot)."""
    return int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape or ())


def is_token_task(observation_space: spaces.Space, action_space: spaces.Space) -> bool:
    """Whether observations are token ids, ``Box(0, V, (L,), int64)`` padded with V, and actions one of V."""
    return (
        isinstance(observation_space, spaces.Box)
        and isinstance(action_space, spaces.Discrete)
        and len(observation_space.shape) == 1
        and observation_space.dtype == np.int64
        and action_space.start == 0
        and bool((observation_space.low == 0).all())
        and bool((observation_space.high == action_space.n).all())
    )


def encode_observations(space: spaces.Space, observations: Any) -> Tensor:
    """A batch of raw observations as a policy takes them.

    int64 [B] from 0 if Discrete, int64 [B, ...] if a Box of int64 (token ids), else float32 [B, D].
    Always a copy: an environment may write its next observation into the same array.
    """
    if isinstance(space, spaces.Discrete):
        return torch.from_numpy(np.array(observations, dtype=np.int64).reshape(-1) - int(space.start))
    if isinstance(space, spaces.Box) and space.dtype == np.int64:
        return torch.from_numpy(np.array(observations, dtype=np.int64)).reshape(-1, *space.shape)
    return torch.from_numpy(np.array(observations, dtype=np.float32)).reshape(-1, flat_size(space))


def decode_actions(space: spaces.Space, actions: Tensor) -> np.ndarray:
    """Batch of policy actions to what the environment takes.

    Discrete actions get the space's start added. Box actions are clipped to their bounds; the
    log-prob stays that of the unclipped action, as in Stable-Baselines3.
    """
    array = actions.numpy()
    if isinstance(space, spaces.Discrete):
        return array + int(space.start) if space.start else array
    assert isinstance(space, spaces.Box)
    return np.clip(array, space.low, space.high)
