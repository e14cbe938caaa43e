"""What observations and actions of a record look like to a network: shapes, sizes and bounds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from offline.datasets import Dataset


def as_tensor(array: Any) -> Tensor:
    """A tensor on the same memory, which is only read."""
    with warnings.catch_warnings():  # of arrays that may not be written to
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.asarray(array))


@dataclass(frozen=True)
class Spaces:
    """Sizes of observations and actions, and how they are encoded for d3rlpy.

    Attributes:
        shape: of one observation as it is logged.
        n_observations: of a Discrete observation space, whose observations become one-hot; else None.
        action_size: length of an action of a Box, or number of actions of a Discrete.
        discrete: whether actions are numbers of a choice.
        start: the first number of a Discrete action space.
        low, high: bounds of a Box [A].
    """

    shape: tuple[int, ...]
    action_size: int
    discrete: bool
    n_observations: int | None = None
    start: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @classmethod
    def of(cls, source: Any) -> Spaces:
        """The spaces of a record or of an environment.

        A record knows bounds as ``action_low`` and ``action_high`` in its metadata; without them its
        actions must lie in [-1, 1], and that is taken as the bounds. Sizes of discrete spaces are
        ``n_actions`` and ``n_observations`` there; without them one more than the largest number.

        Raises:
            ValueError: no bounds are known and there are actions outside [-1, 1]; spaces of an
                environment that are not Box, Discrete or (observations) MultiBinary.
            TypeError: source is neither.
        """
        if isinstance(source, Dataset):
            return cls._of_dataset(source)
        observation = getattr(source, "single_observation_space", getattr(source, "observation_space", None))
        action = getattr(source, "single_action_space", getattr(source, "action_space", None))
        if observation is None or action is None:
            raise TypeError(f"got a {type(source).__name__}; allowed: a Dataset or a Gymnasium environment")
        discrete = isinstance(observation, gym.spaces.Discrete) and observation.start == 0
        if not discrete and not isinstance(observation, gym.spaces.Box | gym.spaces.MultiBinary):
            raise ValueError(f"observation_space={observation}; allowed: Box, MultiBinary, Discrete from 0")
        shape, n_observations = observation.shape, int(observation.n) if discrete else None
        if isinstance(action, gym.spaces.Discrete):
            return cls(shape, int(action.n), True, n_observations, int(action.start))
        if isinstance(action, gym.spaces.Box) and len(action.shape) == 1:
            low, high = (tuple(map(float, bound)) for bound in (action.low, action.high))
            return cls(shape, len(low), False, n_observations, 0, low, high)
        raise ValueError(f"action_space={action}; allowed: Discrete, Box of shape [A]")

    @classmethod
    def _of_dataset(cls, dataset: Dataset) -> Spaces:
        about, shape = dataset.metadata, dataset.observations.shape[1:]
        n_observations = None
        if shape == () and dataset.observations.dtype.kind in "iu":
            largest = max(dataset.observations.max(), dataset.next_observations.max())
            n_observations = int(about.get("n_observations", largest + 1))
        if dataset.discrete:
            n_actions = int(about.get("n_actions", dataset.actions.max() + 1))
            return cls(shape, n_actions, True, n_observations, int(about.get("action_start", 0)))
        size = dataset.actions.shape[1]
        if "action_low" in about and "action_high" in about:
            low, high = (
                tuple(np.broadcast_to(np.asarray(about[name], np.float64), size).tolist())
                for name in ("action_low", "action_high")
            )
        else:
            if np.abs(dataset.actions).max() > 1:
                raise ValueError(
                    f"actions reach from {dataset.actions.min():g} to {dataset.actions.max():g}, and the "
                    "record does not know their bounds: make it with action_low and action_high"
                )
            low, high = (-1.0,) * size, (1.0,) * size
        return cls(shape, size, False, n_observations, 0, low, high)

    @property
    def network_shape(self) -> tuple[int, ...]:
        """Shape of one encoded observation."""
        return (self.n_observations,) if self.n_observations else (self.shape or (1,))

    def encode(self, observations: Any) -> np.ndarray:
        """Observations [N, ...] as float32 [N, *network_shape]."""
        return self.encode_tensor(as_tensor(observations)).numpy()

    def encode_tensor(self, observations: Tensor) -> Tensor:
        """Observations [N, ...] as float32 [N, *network_shape]."""
        if self.n_observations:
            return torch.nn.functional.one_hot(observations.long(), self.n_observations).float()
        return observations.float().reshape(-1, *self.network_shape)

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        """Actions as float32 [N, A], or [N, 1] numbers from 0 if discrete."""
        return self.encode_action_tensor(as_tensor(actions)).numpy()

    def encode_action_tensor(self, actions: Tensor) -> Tensor:
        """Actions as float32 [N, A], or [N, 1] numbers from 0 if discrete."""
        return (actions - self.start)[:, None].float() if self.discrete else actions.float()

    def check_dataset(self, dataset: Dataset) -> None:
        """Raise ValueError unless the record's rows are observations and actions of these spaces."""
        if dataset.observations.shape[1:] != self.shape:
            raise ValueError(
                f"the data has observations of shape {dataset.observations.shape[1:]}; the agent was made "
                f"for {self.shape}"
            )
        size = 1 if dataset.discrete else dataset.actions.shape[1]
        if dataset.discrete != self.discrete or (not self.discrete and size != self.action_size):
            kinds = {True: "discrete actions", False: "actions of a Box"}
            raise ValueError(
                f"the data has {kinds[dataset.discrete]} of size {size}; the agent was made for "
                f"{kinds[self.discrete]} of size {1 if self.discrete else self.action_size}"
            )
        checks = [("actions", dataset.actions, self.start, self.action_size)] if self.discrete else []
        if self.n_observations:
            checks += [
                (name, getattr(dataset, name), 0, self.n_observations)
                for name in ("observations", "next_observations")
            ]
        for name, array, start, count in checks:
            if array.min() < start or array.max() >= start + count:
                raise ValueError(
                    f"the data has {name} from {array.min()} to {array.max()}; the agent was made for "
                    f"{start} to {start + count - 1}"
                )

    def check_env(self, env: Any) -> None:
        """Raise ValueError unless these are the spaces of ``env``; bounds may differ by rounding."""
        other = Spaces.of(env)
        for name in ("shape", "n_observations", "action_size", "discrete", "start"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"the environment has {name}={theirs!r}; the agent was made for {mine!r}")
        if not (np.allclose(self.low, other.low) and np.allclose(self.high, other.high)):
            raise ValueError(
                f"the environment has actions from {list(other.low)} to {list(other.high)}; the agent was "
                f"made for {list(self.low)} to {list(self.high)}"
            )
