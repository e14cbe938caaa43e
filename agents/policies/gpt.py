"""A small GPT as body and policy: one definition of the network for decoding, training and scoring.

References:
    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): the architecture, with
    LayerNorm before each sub-layer, and the initial weights.
    https://github.com/openai/gpt-2/blob/master/src/model.py: the same in code.
    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), https://arxiv.org/abs/1606.08415.
    Pope et al., "Efficiently Scaling Transformer Inference" (2022), https://arxiv.org/abs/2211.05102:
    what a key-value cache costs and saves.

Letters in shapes: B rows, T time steps, C channels (``n_embd``), H heads, D = C / H, V vocabulary,
L context length. There is no dropout: the log-probs of a rollout must be those of the update, and data
sampled from a simulator need no regulariser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from agents.policies import heads
from agents.policies.base import Evaluation
from agents.policies.kv_cache import KVCache
from agents.policies.spaces import is_token_task

INIT_STD = 0.02


def _linear(n_in: int, n_out: int, std: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer with normal weights and zero biases, drawn from the given generator alone."""
    layer = nn.utils.skip_init(nn.Linear, n_in, n_out)
    nn.init.normal_(layer.weight, 0.0, std, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def _split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads; (B, T, 3C) -> three of (B, H, T, D)."""
    B, T, C = qkv.shape
    q, k, v = qkv.view(B, T, 3, n_head, C // (3 * n_head)).permute(2, 0, 3, 1, 4)
    return q, k, v  # (B, H, T, D)


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each added to the residual stream.

    How positions attend to each other is an argument: causally within whole sequences, or to a cache.
    Everything else acts on single positions, so decoding and training share these lines.
    """

    def __init__(self, n_layer: int, n_embd: int, generator: torch.Generator) -> None:
        super().__init__()
        # The residual stream adds up two contributions per block: smaller ones keep its variance at the
        # top independent of the depth.
        std = INIT_STD / math.sqrt(2 * n_layer)
        self.ln_1 = nn.LayerNorm(n_embd)
        self.qkv = _linear(n_embd, 3 * n_embd, INIT_STD, generator)
        self.attn_proj = _linear(n_embd, n_embd, std, generator)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.fc = _linear(n_embd, 4 * n_embd, INIT_STD, generator)
        self.fc_proj = _linear(4 * n_embd, n_embd, std, generator)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attn_proj(attend(self.qkv(self.ln_1(x))))  # (..., C)
        # The exact GELU: GPT-2's tanh approximation takes twice its time on a CPU.
        return x + self.fc_proj(F.gelu(self.fc(self.ln_2(x))))  # (..., C)


class GPT(nn.Module):
    """The body: token ids to hidden states. Policies, reward models and value models put a head on it.

    Sequences are left-aligned and padded behind with ``pad``. Attention is causal, so whatever stands
    behind a position, pads above all, cannot influence it; hidden states at pads mean nothing.

    Args:
        vocab_size: V; the ids are 0 to V - 1.
        context: L, the longest sequence.
        generator: source of the initial weights.
        n_layer, n_head, n_embd: depth, heads, and width C, a multiple of n_head.

    Raises:
        ValueError: a size is not a positive integer, or n_head does not divide n_embd.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        generator: torch.Generator,
        n_layer: int = 2,
        n_head: int = 2,
        n_embd: int = 64,
    ) -> None:
        super().__init__()
        for name, size in (("n_layer", n_layer), ("n_head", n_head), ("n_embd", n_embd)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be an integer >= 1")
        if n_embd % n_head:
            raise ValueError(f"n_embd={n_embd} must be a multiple of n_head={n_head}")
        self.vocab_size, self.context, self.pad = vocab_size, context, vocab_size
        self.n_layer, self.n_head, self.n_embd = n_layer, n_head, n_embd
        self.token_embedding = nn.Parameter(torch.empty(vocab_size, n_embd))
        self.position_embedding = nn.Parameter(torch.empty(context, n_embd))
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding, 0.0, INIT_STD, generator=generator)
        self.blocks = nn.ModuleList(Block(n_layer, n_embd, generator) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)

    def lengths(self, tokens: Tensor) -> Tensor:
        """Filled length of each row; (B, T) -> int64 (B,).

        Raises:
            ValueError: a row holds nothing but padding: there is no position to read it at.
        """
        lengths = (tokens != self.pad).sum(1)
        if len(lengths) and not bool(lengths.all()):
            row = int((lengths == 0).nonzero()[0])
            raise ValueError(f"row {row} of the observations is empty; a sequence needs at least one token")
        return lengths

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Hidden states at every position of whole sequences; int64 (B, T) -> (B, T, C), T <= L.

        Args:
            cache: keeps the keys and values of the rows it is about to append, see `KVCache`.
        """
        T = tokens.shape[1]
        # A pad has no embedding: it borrows the last token's, which nothing reads.
        x = F.embedding(tokens.clamp(max=self.vocab_size - 1), self.token_embedding)
        x = x + self.position_embedding[:T]  # (B, T, C)
        for layer, block in enumerate(self.blocks):

            def attend(qkv: Tensor, layer: int = layer) -> Tensor:
                q, k, v = _split_heads(qkv, self.n_head)
                if cache is not None:
                    cache.write(layer, k, v)
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
                return y.transpose(1, 2).flatten(2)  # (B, T, C)

            x = block(x, attend)
        return self.ln_f(x)  # (B, T, C)

    def decode(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Hidden states at the next position of the rows in the cache; int64 (M,) -> (M, C)."""
        position, attended = cache.next_positions()
        x = F.embedding(tokens, self.token_embedding)
        x = x + F.embedding(position, self.position_embedding)  # (M, C)
        for layer, block in enumerate(self.blocks):

            def attend(qkv: Tensor, layer: int = layer) -> Tensor:
                q, k, v = _split_heads(qkv.unsqueeze(1), self.n_head)  # (M, H, 1, D)
                keys, values = cache.append(layer, k, v, position)  # (M, H, T, D)
                y = F.scaled_dot_product_attention(q, keys, values, attn_mask=attended)
                return y.flatten(1)  # (M, C)

            x = block(x, attend)
        return self.ln_f(x)  # (M, C)

    def last_hidden(self, tokens: Tensor) -> Tensor:
        """Hidden state at each row's last token; (B, T) -> (B, C)."""
        lengths = self.lengths(tokens)
        hidden = self(tokens[:, : int(lengths.max()) if len(lengths) else 0])
        return hidden[torch.arange(len(tokens)), lengths - 1]


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
        self.lm_head = _linear(n_embd, vocab_size, INIT_STD, generator)
        self.value_head = _linear(n_embd, 1, 0.0, generator) if value_head else None

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
            chosen = heads.categorical_quantile(logits, uniform[rows])
        return _scatter(len(observations), rows, chosen)

    def mode(self, observations: Tensor, state: KVCache | None = None, active: Any = None) -> Tensor:
        """The most probable next tokens (the first of ties); (N, L) -> int64 (N,)."""
        with torch.inference_mode():
            rows, logits = self._next_logits(observations, state, active)
            chosen = logits.argmax(-1)
        return _scatter(len(observations), rows, chosen)

    def _next_logits(
        self, observations: Tensor, state: KVCache | None, active: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows that are active, in any order, int64 [M], and their logits for the next token, [M, V]."""
        n_rows, body = len(observations), self.body
        if active is None:
            active = torch.ones(n_rows, dtype=torch.bool)
        active = torch.as_tensor(active)
        if state is None:
            rows = active.nonzero().flatten()
            return rows, self._logits(body.last_hidden(observations[rows]))
        kept, fresh = state.follow(observations, active)
        hidden = []
        if len(kept):
            hidden.append(body.decode(state.last_tokens(observations), state))
        if len(fresh):
            new = observations[fresh]
            lengths = body.lengths(new)
            every = body(new[:, : int(lengths.max())], state)
            state.admit(fresh, lengths)
            hidden.append(every[torch.arange(len(fresh)), lengths - 1])
        return state.rows, self._logits(torch.cat(hidden) if hidden else torch.empty(0, body.n_embd))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits at the temperature; (..., C) -> (..., V)."""
        logits = self.lm_head(hidden)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def evaluate(self, observations: Tensor, actions: Tensor) -> Evaluation:
        """Log-probs, entropies (nats) and values of whole responses, teacher-forced.

        Args:
            observations: int64 (B, L), the last observation before each row's final action: prompt, then
                every action but the last, then padding.
            actions: int64 (B, T), padded behind with -1. With n actions and filled length f, action t is
                predicted at position f - n + t. Or (B,), one action for each observation.

        Returns:
            Fields of the shape of ``actions``, 0 at its padding, differentiable.

        Raises:
            ValueError: a row is shorter than its actions and a token before them.
        """
        if actions.ndim == 1:
            return Evaluation(*(x.squeeze(1) for x in self.evaluate(observations, actions.unsqueeze(1))))
        lengths, real = self.body.lengths(observations), actions >= 0
        start = lengths - real.sum(1)
        if bool((start < 0).any()):
            row = int((start < 0).nonzero()[0])
            raise ValueError(
                f"row {row} has {int(real[row].sum())} actions, but its observation only "
                f"{int(lengths[row])} tokens; it must hold the prompt and all actions but the last"
            )
        hidden = self.body(observations[:, : int(lengths.max()) if len(lengths) else 0])
        # Only where an action was taken: the head on every position would cost more than the body.
        row, t = real.nonzero(as_tuple=True)
        hidden = hidden[row, start[row] + t]  # (number of actions, C)
        logp, entropy = heads.categorical_log_prob_and_entropy(self._logits(hidden), actions[row, t])
        zeros = logp.new_zeros(actions.shape)
        value = self._value(hidden)
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


def _scatter(n_rows: int, rows: Tensor, chosen: Tensor) -> Tensor:
    """Actions of all rows, made outside inference mode so that a loss may use them."""
    actions = torch.zeros(n_rows, dtype=torch.int64)
    actions[rows] = chosen
    return actions
