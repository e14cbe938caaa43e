"""The body of a small GPT: one definition of the network for decoding, training and scoring.

References:
    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): the architecture, with
    LayerNorm before each sub-layer, and the initial weights.
    https://github.com/openai/gpt-2/blob/master/src/model.py: the same in code.
    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), https://arxiv.org/abs/1606.08415.

Letters in shapes: B rows, T time steps, C channels (``n_embd``), H heads, D = C / H, V vocabulary,
L context length. There is no dropout: the log-probs of a rollout must be those of the update, and data
sampled from a simulator need no regulariser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agents.policies.kv_cache import KVCache

INIT_STD = 0.02


def normal(n_in: int, n_out: int, std: float, generator: torch.Generator) -> nn.Parameter:
    """A matrix of normal weights, drawn from the given generator alone."""
    return nn.Parameter(torch.randn(n_in, n_out, generator=generator) * std)


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each added to the residual stream.

    How positions attend to each other is an argument: causally within whole sequences, or to a cache.
    Everything else acts on single positions, so decoding and training share these lines. The layers
    have no biases, which LayerNorm's make up for: each product can then be added to the stream where it
    is computed. As in GPT-2's code, a weight is (inputs, outputs).
    """

    def __init__(self, n_layer: int, n_embd: int, generator: torch.Generator) -> None:
        super().__init__()
        C = n_embd
        # The residual stream adds up two contributions per block: smaller ones keep its variance at the
        # top independent of the depth.
        small = INIT_STD / math.sqrt(2 * n_layer)
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv = normal(C, 3 * C, INIT_STD, generator)
        self.attn_proj = normal(C, C, small, generator)
        self.fc = normal(C, 4 * C, INIT_STD, generator)
        self.fc_proj = normal(4 * C, C, small, generator)
        # The same parameters in a list: looking them up one by one and calling modules takes a third of
        # the time of a block that decodes a few rows.
        self._norms = [(norm.weight, norm.bias) for norm in (self.ln_1, self.ln_2)]
        self._weights = [self.qkv, self.attn_proj, self.fc, self.fc_proj]

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """The stream after this block; (P, C) -> (P, C), P positions of whatever sequences."""
        (ln_1, ln_2), (qkv, attn_proj, fc, fc_proj) = self._norms, self._weights
        width = x.shape[1:]  # C
        h = attend(torch.layer_norm(x, width, *ln_1) @ qkv)  # (P, C)
        x = torch.addmm(x, h, attn_proj)
        # The exact GELU: GPT-2's tanh approximation takes twice its time on a CPU.
        h = F.gelu(torch.layer_norm(x, width, *ln_2) @ fc)  # (P, 4C)
        return torch.addmm(x, h, fc_proj)


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
        self.token_embedding = normal(vocab_size, n_embd, INIT_STD, generator)
        self.position_embedding = normal(context, n_embd, INIT_STD, generator)
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
        B, T = tokens.shape
        # A pad has no embedding: it borrows the last token's, which nothing reads.
        x = F.embedding(tokens.clamp(max=self.vocab_size - 1), self.token_embedding)
        x = (x + self.position_embedding[:T]).flatten(0, 1)  # (B * T, C)
        for layer, block in enumerate(self.blocks):
            x = block(x, partial(self._attend, B, T, cache, layer))
        return self.ln_f(x).view(B, T, self.n_embd)

    def _attend(self, B: int, T: int, cache: KVCache | None, layer: int, qkv: Tensor) -> Tensor:
        """Causal attention within whole sequences; (B * T, 3C) -> (B * T, C)."""
        H, D = self.n_head, self.n_embd // self.n_head
        q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        if cache is not None:
            cache.write(layer, k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(B * T, H * D)

    def decode(self, cache: KVCache) -> Tensor:
        """Hidden states of the rows in the cache at their newest token, which it is about to hold; (M, C)."""
        tokens, position = cache.advance()
        x = F.embedding(tokens, self.token_embedding) + F.embedding(position, self.position_embedding)
        for layer, block in enumerate(self.blocks):
            x = block(x, partial(cache.attend, layer))
        return self.ln_f(x)  # (M, C)

    def last_hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Hidden state at each row's last token; (B, T) -> (B, C)."""
        hidden, lengths = self._filled(tokens, cache)
        return hidden[torch.arange(len(tokens)), lengths - 1]

    def action_hidden(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states that predict the actions of whole responses.

        Args:
            observations: int64 (B, L), the last observation before each row's final action: prompt, then
                every action but the last, then padding.
            actions: int64 (B, T), padded behind with -1. With n actions and filled length f, action t is
                predicted at position f - n + t.

        Returns:
            Which actions are real, bool (B, T), and the hidden state of each, (number of them, C), in
            the order of ``actions[real]``.

        Raises:
            ValueError: a row is shorter than its actions and a token before them.
        """
        hidden, lengths = self._filled(observations, None)
        real = actions >= 0
        first = lengths - real.sum(1)
        if bool((first < 0).any()):
            bad = int((first < 0).nonzero()[0])
            raise ValueError(
                f"row {bad} has {int(real[bad].sum())} actions, but its observation only "
                f"{int(lengths[bad])} tokens; it must hold the prompt and all actions but the last"
            )
        row, t = real.nonzero(as_tuple=True)
        return real, hidden[row, first[row] + t]

    def _filled(self, tokens: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """Hidden states up to the longest row's last token, and the rows' lengths."""
        lengths = self.lengths(tokens)
        longest = int(lengths.max()) if len(lengths) else 0
        return self(tokens[:, :longest], cache), lengths
