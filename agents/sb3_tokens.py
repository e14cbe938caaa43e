"""What Stable-Baselines3 needs to read token ids: a feature extractor."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn


class TokenFeatures(BaseFeaturesExtractor):
    """Features of a token sequence: its last tokens in order, the mean of all, and its length.

    Without an extractor SB3 hands a network the ids as if they were magnitudes. Here each of the last
    ``n_last`` tokens has its embedding at its own place, as in the neural n-gram model of Bengio et al.,
    "A Neural Probabilistic Language Model" (2003); the mean of all embeddings says what stood before
    them, and the embedding of the length what time it is. Places before the first token are 0. ::

        from stable_baselines3 import PPO
        PPO("MlpPolicy", env, policy_kwargs={"features_extractor_class": TokenFeatures})

    ``agents.make("sb3:PPO", env)``, and sb3-contrib's MaskablePPO by its name, take it by themselves.
    ``features_extractor_kwargs={"n_embd": 64}`` sets the arguments.

    Args:
        observation_space: ``Box(0, V, (L,), int64)``: ids, then V as padding.
        n_embd: width of an embedding; the features are ``(n_last + 2) * n_embd`` wide.
        n_last: how many of the last tokens are seen in order.

    Raises:
        ValueError: the observations are not token ids, or an argument is not a positive integer.
    """

    def __init__(self, observation_space: spaces.Space, n_embd: int = 32, n_last: int = 4) -> None:
        for name, size in (("n_embd", n_embd), ("n_last", n_last)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be an integer >= 1")
        if not (
            isinstance(observation_space, spaces.Box)
            and len(observation_space.shape) == 1
            and np.issubdtype(observation_space.dtype, np.integer)
            and (observation_space.low == 0).all()
        ):
            raise ValueError(
                f"TokenFeatures reads observations Box(0, V, (L,), int64), got {observation_space}"
            )
        super().__init__(observation_space, (n_last + 2) * n_embd)
        self.pad = int(observation_space.high.max())
        self.n_last = n_last
        self.tokens = nn.Embedding(self.pad + 1, n_embd, padding_idx=self.pad)  # padding is 0
        self.length = nn.Embedding(observation_space.shape[0] + 1, n_embd)

    def forward(self, observations: Tensor) -> Tensor:
        """Float or integer ids [B, L] -> features [B, (n_last + 2) * n_embd]."""
        ids = observations.long()  # SB3 makes floats of all observations, exact up to 2 ** 24
        lengths = (ids != self.pad).sum(1, keepdim=True)
        embedded = self.tokens(ids)
        mean = embedded.sum(1) / lengths.clamp(min=1)
        places = lengths - 1 - torch.arange(self.n_last, device=ids.device)  # the last token first
        last = self.tokens(ids.gather(1, places.clamp(min=0)).where(places >= 0, self.pad))
        return torch.cat([last.flatten(1), mean, self.length(lengths[:, 0])], 1)
