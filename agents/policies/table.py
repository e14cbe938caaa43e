"""A policy that is a table: one row of logits and one value per discrete observation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agents.policies import heads
from agents.policies.base import Evaluation


class TablePolicy(nn.Module):
    """``pi(a|s) = softmax(logits[s])[a]``, ``V(s) = values[s]``.

    Args:
        n_observations, n_actions: S and A.
        reference_logp: [S, A], log-probs to start from; None starts uniform. Values start at 0.

    Raises:
        ValueError: reference_logp has another shape.
    """

    def __init__(
        self, n_observations: int, n_actions: int, reference_logp: np.ndarray | None = None
    ) -> None:
        super().__init__()
        shape = (n_observations, n_actions)
        if reference_logp is not None and reference_logp.shape != shape:
            raise ValueError(f"reference_logp has shape {reference_logp.shape}, expected {shape}")
        start = np.zeros(shape) if reference_logp is None else reference_logp
        self.logits = nn.Parameter(torch.tensor(start, dtype=torch.float32))
        self.values = nn.Parameter(torch.zeros(n_observations))

    def sample(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        return heads.categorical_sample(F.embedding(observations, self.logits), generator)

    def mode(self, observations: Tensor) -> Tensor:
        return F.embedding(observations, self.logits).argmax(-1)

    def evaluate(self, observations: Tensor, actions: Tensor) -> Evaluation:
        # Normalise the S rows once instead of the B rows of the batch: one prompt with a batch of
        # 64 then costs a 64th, and the gradient is the same.
        logp = torch.log_softmax(self.logits, -1)
        # A reference may rule answers out: 0 * -inf is NaN, 0 * (a finite stand-in) is 0.
        entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
        return Evaluation(logp[observations, actions], entropy[observations], self.values[observations])

    def value(self, observations: Tensor) -> Tensor:
        return self.values[observations]

    def probabilities(self, observations: Tensor) -> Tensor:
        """pi(.|s): [B, A]."""
        return torch.softmax(F.embedding(observations, self.logits), -1)
