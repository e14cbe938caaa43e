"""Behaviour policies: small Gaussian networks in numpy, shipped as plain arrays, that act like any agent.

A file is an ``.npz`` of float32 arrays and one JSON string. It is read with ``allow_pickle=False``:
loading a policy never runs code, and neither torch nor Stable-Baselines3 is needed to act.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box

LOG_STD_RANGE = (-20.0, 2.0)
WEIGHTS = Path(__file__).parent / "weights"  # the shipped policies, ENV-medium.npz


@dataclass
class BehaviourPolicy:
    """A squashed Gaussian policy, as SAC trains it (Haarnoja et al. 2018, appendix C).

    The action is ``tanh(u)``, u ~ N(mean(s), diag(std(s)^2)), stretched onto the action space; mean and
    std are two heads on one network with ReLU between its layers. ``predict`` draws from it, as the
    behaviour policy of a dataset does; with ``deterministic=True`` it gives ``tanh(mean(s))``.

    Attributes:
        weights, biases: of each layer, float32 [in, out] and [out]; the last layer gives the means and
            the logarithms of the deviations side by side, 2A outputs.
        low, high: bounds of the actions, float32 [A].
        about: where the policy comes from: environment, target and measured return, steps, versions.
    """

    weights: list[np.ndarray]
    biases: list[np.ndarray]
    low: np.ndarray
    high: np.ndarray
    about: dict[str, Any]

    def __post_init__(self) -> None:
        self.seed(None)

    def seed(self, seed: int | None) -> None:
        """Seed what `predict` draws."""
        self._random = np.random.default_rng(seed)

    def distribution(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation before tanh, each float32 [..., A], for observations [..., D]."""
        hidden = np.asarray(observations, np.float32)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = np.maximum(hidden @ weight + bias, 0)
        mean, log_std = np.split(hidden @ self.weights[-1] + self.biases[-1], 2, axis=-1)
        return mean, np.exp(np.clip(log_std, *LOG_STD_RANGE))

    def predict(
        self,
        observation: np.ndarray,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:
        """Actions float32 [A] or [N, A] for observations [D] or [N, D]."""
        mean, std = self.distribution(observation)
        if not deterministic:
            mean = mean + std * self._random.standard_normal(mean.shape, np.float32)
        unit = (np.tanh(mean) + 1) / 2
        return np.clip(self.low + unit * (self.high - self.low), self.low, self.high), state

    def save(self, path: str | Path) -> None:
        """Write the ``.npz`` file."""
        arrays: dict[str, Any] = {f"weight_{i}": w for i, w in enumerate(self.weights)}
        arrays |= {f"bias_{i}": b for i, b in enumerate(self.biases)}
        arrays |= {"low": self.low, "high": self.high, "about": np.array(json.dumps(self.about))}
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path, env: Any = None) -> BehaviourPolicy:
        """Read a file that `save` wrote.

        Args:
            env: its spaces must be the policy's, where it is given.

        Raises:
            ValueError: the file is no behaviour policy; its sizes are not those of ``env``.
        """
        with np.load(path, allow_pickle=False) as arrays:
            missing = {"weight_0", "bias_0", "low", "high", "about"} - set(arrays.files)
            if missing:
                raise ValueError(f"{path} is no behaviour policy: it lacks {', '.join(sorted(missing))}")
            n_layers = sum(name.startswith("weight_") for name in arrays.files)
            policy = cls(
                [arrays[f"weight_{i}"] for i in range(n_layers)],
                [arrays[f"bias_{i}"] for i in range(n_layers)],
                arrays["low"], arrays["high"], json.loads(str(arrays["about"])),
            )  # fmt: skip
        if env is not None:
            policy.check_spaces(env)
        return policy

    def check_spaces(self, env: Any) -> None:
        """Raise ValueError unless the policy's observations and actions are those of ``env``."""
        observation, action = (
            getattr(env, f"single_{name}", None) or getattr(env, name)
            for name in ("observation_space", "action_space")
        )
        own = ((self.weights[0].shape[0],), self.low.shape)
        if not isinstance(action, Box) or (observation.shape, action.shape) != own:
            raise ValueError(
                f"the policy, trained on {self.about.get('env')}, takes observations of shape {own[0]} and "
                f"gives actions of shape {own[1]}; the environment has {observation} and {action}"
            )
