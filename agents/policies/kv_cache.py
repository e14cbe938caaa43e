"""The decoding state of a `GPTPolicy`: keys and values of the tokens that it has already read.

Source: Pope et al., "Efficiently Scaling Transformer Inference" (2022), https://arxiv.org/abs/2211.05102,
on what such a cache costs and saves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 16  # columns that the cache grows by


class KVCache:
    """Keys and values of up to N rows, each at its own length, in one tensor.

    Rows that are decoding occupy the first M slots, in no particular order. When a row finishes, a row
    from the end moves into its slot: a step costs what its active rows cost, and a finished row is paid
    for with one copy.

    A step reads all columns there are, and masks those that a row has not filled: reading memory from end
    to end was measured to take a third of the time of reading parts of it with gaps between them. For this
    the tensor is as wide as its longest row, rounded up, and is copied to a wider one every 16 steps.

    ==============  ===================  ============================================================
    attribute       shape                meaning
    ==============  ===================  ============================================================
    ``rows``        [M]                  row of the batch in each occupied slot
    ``lengths``     [M]                  tokens cached in each occupied slot
    ``tokens``      [N, L]               observations of the last call, to recognise a new episode
    ==============  ===================  ============================================================

    Args:
        n_rows: N, rows of the batch.
        n_layer, n_head, context, head_size: sizes of the network; context is L.
        pad: the id behind the end of each row.
        dtype: of keys and values.
    """

    def __init__(
        self, n_rows: int, n_layer: int, n_head: int, context: int, head_size: int, pad: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._cache = torch.empty(n_layer, 2, n_rows, n_head, 0, head_size, dtype=dtype)
        self._context, self._pad = context, pad
        self._views_of = (0, 0)  # occupied slots and columns for which a step has prepared its views
        # NumPy for what is a few numbers a row: its small operations cost less than torch's.
        self.tokens = np.full((n_rows, context), pad)
        self.rows = np.empty(0, np.int64)
        self.lengths = np.empty(0, np.int64)

    # ---------------------------------------------------------------- which rows are in the cache

    def follow(self, observations: Tensor, active: Any = None) -> np.ndarray:
        """Keep the rows that go on, drop the others.

        A row goes on if it is active and differs from its last observation by one token appended.
        Comparing tokens, not only lengths, recognises a new episode whatever the length of its prompt.

        Args:
            observations: int64 [N, L].
            active: bool [N]; None: all.

        Returns:
            The active rows that are not in the cache, to be read from their beginning.

        Raises:
            ValueError: the observations are not those of as many rows, or not as long, as this was made for.
        """
        new = observations.numpy()
        if new.shape != self.tokens.shape:
            raise ValueError(
                f"observations have shape {new.shape}, the decoding state was made for {self.tokens.shape}"
            )
        active = np.ones(len(new), bool) if active is None else np.asarray(active)
        if len(self.rows):
            now, before = new[self.rows], self.tokens[self.rows]
            # Position ``lengths`` was padding, so a token there is the one difference that is allowed.
            next_position = np.minimum(self.lengths, new.shape[1] - 1)
            appended = now[np.arange(len(now)), next_position] != self._pad
            appended &= (self.lengths == next_position) & ((now != before).sum(1) == 1)
            goes_on = active[self.rows] & appended
            if not goes_on.all():
                self._compact(goes_on)
        self.tokens[:] = new
        missing = active.copy()
        missing[self.rows] = False
        return np.flatnonzero(missing)

    def _compact(self, stays: np.ndarray) -> None:
        """Drop the slots that do not stay: rows from behind fill the gaps."""
        kept = int(stays.sum())
        gaps = np.flatnonzero(~stays[:kept])
        movers = kept + np.flatnonzero(stays[kept:])
        if len(gaps):
            self._cache[:, :, gaps] = self._cache[:, :, movers]
            self.rows[gaps], self.lengths[gaps] = self.rows[movers], self.lengths[movers]
        self.rows, self.lengths = self.rows[:kept], self.lengths[:kept]

    def admit(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Count rows as cached whose keys and values `write` has put behind the occupied slots."""
        self.rows, self.lengths = np.concatenate([self.rows, rows]), np.concatenate([self.lengths, lengths])

    # ---------------------------------------------------------------- keys and values

    def _reserve(self, width: int) -> None:
        """Make room for ``width`` columns in each row."""
        n_layer, _, N, H, before, D = self._cache.shape
        if width <= before:
            return
        width = min(-(-width // CHUNK) * CHUNK, self._context)
        wider = self._cache.new_empty(n_layer, 2, N, H, width, D)
        used = wider[:, :, : len(self.rows)]
        used[..., :before, :] = self._cache[:, :, : len(self.rows)]
        used[..., before:, :] = 0.0
        self._cache, self._views_of = wider, (0, 0)
        self._columns = torch.arange(width)
        # Where column 0 of (slot, key or value, head) is, in a layer seen as a list of vectors.
        slot_head = torch.arange(N * H).view(N, 1, H) * width
        self._first = (slot_head + torch.arange(2).view(2, 1) * (N * H * width)).flatten(1)  # [N, 2 * H]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put whole sequences, (B, H, T, D) each, behind the occupied slots."""
        first, (B, _, T, _) = len(self.rows), k.shape
        self._reserve(min(T + 1, self._context))  # the next step will want one more
        slots = self._cache[layer, :, first : first + B]
        slots[0, :, :, :T], slots[1, :, :, :T] = k, v
        # Not whatever the memory held: masked columns have weight 0, but 0 * NaN is NaN.
        slots[:, :, :, T:] = 0.0

    def advance(self) -> tuple[Tensor, Tensor]:
        """Begin a step of one token for each cached row; returns the tokens and their positions, (M,) each.

        What is the same for all layers is computed here: the mask and where keys and values go.
        """
        tokens = torch.from_numpy(self.tokens[self.rows, self.lengths])
        position = torch.from_numpy(self.lengths)
        self._reserve(int(self.lengths.max()) + 1)
        self.lengths = self.lengths + 1
        (_, _, N, H, W, D), M = self._cache.shape, len(position)
        behind = self._columns > position.view(M, 1, 1)  # (M, 1, W)
        mask = torch.zeros(M, H, W, dtype=self._cache.dtype)
        self._mask = mask.masked_fill_(behind, -torch.inf).view(M * H, 1, W)
        self._target = (self._first[:M] + position.unsqueeze(1)).flatten()  # (M * 2 * H,)
        if self._views_of != (M, W):
            self._views_of = (M, W)
            used = self._cache.view(-1, 2, N * H, W, D)[:, :, : M * H]
            self._views = [
                (layer.view(-1, D), keys.transpose(1, 2), values)  # (*, D), (M * H, D, W), (M * H, W, D)
                for layer, (keys, values) in zip(self._cache, used, strict=True)
            ]
        return tokens, position

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Cache one position per row and attend from it to all of its row's; (M, 3C) -> (M, C).

        Two batched products: `scaled_dot_product_attention` takes about twice as long for one query per row.
        """
        vectors, keys, values = self._views[layer]
        M, D = len(qkv), vectors.shape[1]
        H = len(values) // M
        q, kv = qkv.view(M, 3 * H, D).split([H, 2 * H], 1)
        vectors.index_copy_(0, self._target, kv.reshape(-1, D))
        scores = torch.baddbmm(self._mask, q.reshape(M * H, 1, D), keys, alpha=D**-0.5)
        return torch.bmm(torch.softmax(scores, -1), values).view(M, H * D)
