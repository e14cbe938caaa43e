"""The decoding state of a `GPTPolicy`: keys and values of the tokens that it has already read."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of up to N rows, each at its own length, in one tensor allocated once.

    Rows that are decoding occupy the first M slots, in no particular order. When a row finishes, a row
    from the end moves into its slot: a step costs what its active rows cost, and a finished row is paid
    for with one copy.

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
        # Zeros, not whatever the memory held: masked positions have weight 0, but 0 * NaN is NaN.
        self._cache = torch.zeros(n_layer, 2, n_rows, n_head, context, head_size, dtype=dtype)
        self._columns = torch.arange(context)
        self._slots = torch.arange(n_rows)
        self._pad = pad
        self._width = 0  # columns that the next token attends to, its own included
        self.tokens = torch.full((n_rows, context), pad)
        self.rows = torch.empty(0, dtype=torch.int64)
        self.lengths = torch.empty(0, dtype=torch.int64)

    # ---------------------------------------------------------------- which rows are in the cache

    def follow(self, observations: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the rows that go on; returns them, and the active rows to be read from their beginning.

        A row goes on if it is active and differs from its last observation by one token appended.
        Comparing tokens, not only lengths, recognises a new episode whatever the length of its prompt.
        """
        if observations.shape != self.tokens.shape:
            raise ValueError(
                f"observations have shape {tuple(observations.shape)}, but the decoding state was made for "
                f"{tuple(self.tokens.shape)}"
            )
        if len(self.rows):
            filled = (observations != self._pad).sum(1)
            appended = (observations != self.tokens).sum(1) == 1
            goes_on = (active & appended)[self.rows] & (filled[self.rows] == self.lengths + 1)
            if not bool(goes_on.all()):
                self._compact(goes_on)
        missing = active.clone()
        missing[self.rows] = False
        self.tokens.copy_(observations)
        return self.rows, missing.nonzero().flatten()

    def _compact(self, stays: Tensor) -> None:
        """Drop the slots that do not stay: rows from behind fill the gaps."""
        kept = int(stays.sum())
        gaps = (~stays[:kept]).nonzero().flatten()
        movers = kept + stays[kept:].nonzero().flatten()
        if len(gaps):
            self._cache[:, :, gaps] = self._cache[:, :, movers]
            self.rows[gaps], self.lengths[gaps] = self.rows[movers], self.lengths[movers]
        self.rows, self.lengths = self.rows[:kept], self.lengths[:kept]

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        """Count rows as cached whose keys and values `write` has put behind the occupied slots."""
        self.rows, self.lengths = torch.cat([self.rows, rows]), torch.cat([self.lengths, lengths])

    # ---------------------------------------------------------------- keys and values

    def last_tokens(self, observations: Tensor) -> Tensor:
        """The token that each cached row has read but not cached yet; int64 (M,)."""
        return observations[self.rows, self.lengths]

    def next_positions(self) -> tuple[Tensor, Tensor]:
        """Positions of the next tokens, (M,), and the columns each attends to, bool (M, 1, 1, T)."""
        position = self.lengths
        self._width = int(position.max()) + 1
        self.lengths = position + 1
        attended = self._columns[: self._width] <= position.unsqueeze(1)
        return position, attended[:, None, None]

    def append(self, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Add one position per row, (M, H, 1, D) each; returns all of them so far, (M, H, T, D)."""
        M = len(k)
        keys, values = self._cache[layer, :, :M]
        slots = self._slots[:M]
        keys[slots, :, position], values[slots, :, position] = k[:, :, 0], v[:, :, 0]
        return keys[:, :, : self._width], values[:, :, : self._width]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put whole sequences, (B, H, T, D) each, behind the occupied slots."""
        first, (B, _, T, _) = len(self.rows), k.shape
        self._cache[layer, 0, first : first + B, :, :T] = k
        self._cache[layer, 1, first : first + B, :, :T] = v
