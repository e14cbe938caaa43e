"""A small GPT as policy for token tasks (its network: `agents.policies.transformer`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from agents.policies import heads
from agents.policies.base import Evaluation
from agents.policies.kv_cache import KVCache
from agents.policies.spaces import is_token_task
from agents.policies.transformer import GPT, INIT_STD, normal

__all__ = ["GPT", "GPTPolicy"]


class GPTPolicy(nn.Module):
    """pi(token | tokens so far) for token tasks, with a value head on the same body.

    A sequence policy: `sample` and `mode` take a decoding state, the cache of the rows' keys and values,
    so that a step of the environment costs one token and not the whole sequence. `evaluate` scores whole
    responses in one teacher-forced pass. Head and token embedding are two matrices: at these vocabulary
    sizes the second costs little, and shared ones start with a bias towards repeating the last token.

    Args:
        observation_space: ``Box(0, V, (L,), int64)``: ids, then V as padding.
        action_space: ``Discrete(V)``.
        generator: source of the initial weights.
        n_layer, n_head, n_embd: see `GPT`.
        temperature: divides the logits, in sampling and in log-probs alike, > 0.
        value_head: without one every value is 0.

    Raises:
        ValueError: the spaces are not those of a token task, or an argument is out of its range.
    """

    reads_sequences = True

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        generator: torch.Generator,
        n_layer: int = 2,
        n_head: int = 2,
        n_embd: int = 64,
        temperature: float = 1.0,
        value_head: bool = True,
    ) -> None:
        super().__init__()
        if not is_token_task(observation_space, action_space):
            raise ValueError(
                "a GPT needs observations Box(0, V, (L,), int64) and actions Discrete(V), where V is the "
                f"padding; this environment has {observation_space} and {action_space}"
            )
        if not (isinstance(temperature, int | float) and 0.0 < temperature < math.inf):
            raise ValueError(f"temperature={temperature!r} must be a number > 0 (`mode` is greedy)")
        assert isinstance(observation_space, spaces.Box) and isinstance(action_space, spaces.Discrete)
        vocab_size = int(action_space.n)
        self.temperature = float(temperature)
        self.body = GPT(vocab_size, observation_space.shape[0], generator, n_layer, n_head, n_embd)
        self.lm_head = _head(normal(vocab_size, n_embd, INIT_STD, generator))
        self.value_head = _head(nn.Parameter(torch.zeros(1, n_embd))) if value_head else None

    def new_state(self, n_rows: int) -> KVCache:
        """An empty decoding state for a batch of ``n_rows``; private to this policy, changed in place."""
        body = self.body
        return KVCache(n_rows, body.n_layer, body.n_head, body.context, body.n_embd // body.n_head,
                       body.pad, self.lm_head.weight.dtype)  # fmt: skip

    def sample(
        self,
        observations: Tensor,
        generator: torch.Generator,
        state: KVCache | None = None,
        active: Any = None,
    ) -> Tensor:
        """Draw the next tokens; (N, L) -> int64 (N,), 0 in rows that are not active.

        Each row has its own uniform number whether it is active or not, so neither the state nor the
        other rows' ends change what a row draws.
        """
        uniform = torch.rand((len(observations), 1), generator=generator)
        with torch.inference_mode():
            rows, logits = self._next_logits(observations, state, active)
            # A few numbers are indexed with NumPy, here and in `_scatter`: torch takes several times as long.
            chosen = heads.categorical_quantile(logits, torch.from_numpy(uniform.numpy()[rows]))
        return _scatter(len(observations), rows, chosen)

    def mode(self, observations: Tensor, state: KVCache | None = None, active: Any = None) -> Tensor:
        """The most probable next tokens (the first of ties); (N, L) -> int64 (N,)."""
        with torch.inference_mode():
            rows, logits = self._next_logits(observations, state, active)
            chosen = logits.argmax(-1)
        return _scatter(len(observations), rows, chosen)

    def _next_logits(
        self, observations: Tensor, state: KVCache | None, active: Any
    ) -> tuple[np.ndarray, Tensor]:
        """Rows that are active, in any order, int64 [M], and their logits for the next token, [M, V]."""
        body = self.body
        if state is None:
            body.lengths(observations)  # names an empty row by its number in the whole batch
            rows = np.arange(len(observations)) if active is None else np.flatnonzero(active)
            return rows, self._logits(body.last_hidden(observations[rows]))
        fresh = state.follow(observations, active)
        hidden = []
        if len(state.rows):
            hidden.append(body.decode(state))
        if len(fresh):
            lengths = body.lengths(observations).numpy()
            hidden.append(body.last_hidden(observations[fresh], state))
            state.admit(fresh, lengths[fresh])
        return state.rows, self._logits(torch.cat(hidden) if hidden else torch.empty(0, body.n_embd))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits at the temperature; (..., C) -> (..., V)."""
        logits = self.lm_head(hidden)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def evaluate(self, observations: Tensor, actions: Tensor) -> Evaluation:
        """Log-probs, entropies (nats) and values of whole responses, teacher-forced.

        Args:
            observations, actions: as `GPT.action_hidden`; or actions (B,), one for each observation.

        Returns:
            Fields of the shape of ``actions``, 0 at its padding, differentiable.
        """
        if actions.ndim == 1:
            return Evaluation(*(x.squeeze(1) for x in self.evaluate(observations, actions.unsqueeze(1))))
        # Only where an action was taken: the head on every position could cost more than the body.
        real, hidden = self.body.action_hidden(observations, actions)
        logp, entropy = heads.categorical_log_prob_and_entropy(self._logits(hidden), actions[real])
        value, zeros = self._value(hidden), logp.new_zeros(actions.shape)
        return Evaluation(*(zeros.masked_scatter(real, x) for x in (logp, entropy, value)))

    def _value(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (...)."""
        if self.value_head is None:
            return hidden.new_zeros(hidden.shape[:-1])
        return self.value_head(hidden).squeeze(-1)

    def value(self, observations: Tensor) -> Tensor:
        """V after the last token of each row; (B, L) -> (B,)."""
        return self._value(self.body.last_hidden(observations))

    def probabilities(self, observations: Tensor) -> Tensor:
        """pi(. | tokens so far); (B, L) -> (B, V)."""
        return torch.softmax(self._logits(self.body.last_hidden(observations)), -1)


def _head(weight: nn.Parameter) -> nn.Linear:
    """A linear layer with this weight [outputs, C] and biases 0, which draws nothing of its own."""
    layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0])
    layer.weight = weight
    nn.init.zeros_(layer.bias)
    return layer


def _scatter(n_rows: int, rows: np.ndarray, chosen: Tensor) -> Tensor:
    """Actions of all rows, made outside inference mode so that a loss may use them."""
    actions = np.zeros(n_rows, np.int64)
    actions[rows] = chosen.numpy()
    return torch.from_numpy(actions)
