"""Independent random streams for the rows of a batched environment."""

from collections.abc import Sequence

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class RowRandom:
    """One ``np.random.Generator`` per row, read for many rows at a time.

    Row i of a vector environment must draw what the scalar environment with the same seed draws,
    and a step over thousands of rows must not call thousands of generators. So each generator is
    read `block` uniforms ahead into a row of a buffer, and every other distribution is computed
    from those uniforms. Hence the numbers do not depend on `block`, nor on what other rows do.
    With ``block=1`` nothing is read ahead, and a generator's own state is the whole state.

    Generators are made on first use: a batch that draws nothing pays nothing for its seeds.

    Args:
        num_rows: number of rows N.
        block: uniforms read from a generator at once.
    """

    def __init__(self, num_rows: int, block: int = 128) -> None:
        self._generators: list[np.random.Generator | None] = [None] * num_rows
        self._seeds: list[int | None] = [None] * num_rows
        self._buffer = np.empty((num_rows, block))
        self._cursor = np.full(num_rows, block)

    def seed(self, row: int, seed: int) -> None:
        """Restart a row's stream from `seed`; what had been read ahead is dropped."""
        self._generators[row], self._seeds[row] = None, seed
        self._cursor[row] = self._buffer.shape[1]

    def set_generator(self, row: int, generator: np.random.Generator) -> None:
        """Let a row draw from `generator`; what had been read ahead from another is dropped."""
        if self._generators[row] is not generator:
            self._generators[row], self._seeds[row] = generator, -1
            self._cursor[row] = self._buffer.shape[1]

    def generator(self, row: int) -> np.random.Generator:
        """The generator of a row; up to `block` - 1 of its uniforms may wait in the buffer."""
        generator = self._generators[row]
        if generator is None:
            generator, self._seeds[row] = seeding.np_random(self._seeds[row])
            self._generators[row] = generator
        return generator

    def seed_of(self, row: int) -> int:
        """The seed of a row, -1 where it is not known (Gymnasium's convention)."""
        self.generator(row)
        seed = self._seeds[row]
        return -1 if seed is None else seed

    def uniform(self, rows: IntArray) -> FloatArray:
        """Next uniform in [0, 1) of each of the (distinct) `rows`, shape [k]."""
        block = self._buffer.shape[1]
        for row in rows[self._cursor[rows] == block].tolist():
            self.generator(row).random(out=self._buffer[row])
            self._cursor[row] = 0
        cursor = self._cursor[rows]
        self._cursor[rows] = cursor + 1
        return np.asarray(self._buffer[rows, cursor])

    def integers(self, rows: IntArray, high: int) -> IntArray:
        """Next integer of 0 ... high-1 of each of the `rows`, shape [k]; takes one uniform each."""
        # u * high may round up to high itself; the bias of flooring is below high / 2**53.
        drawn = (self.uniform(rows) * high).astype(np.int64)
        return np.minimum(drawn, high - 1)

    def normal(self, rows: IntArray) -> FloatArray:
        """Next standard normal of each of the `rows`, shape [k]; takes two uniforms each.

        Box and Muller (1958), "A note on the generation of random normal deviates". NumPy's own
        normals take a varying number of words, so they could not share a buffer with uniforms.
        """
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(rows)))  # 1 - u is never 0
        return radius * np.cos(2.0 * np.pi * self.uniform(rows))


def row_seeds(seed: int | Sequence[int | None] | None, num_rows: int) -> list[int | None]:
    """The seed of each row: s gives s, s+1, ...; a sequence gives its entries; None changes none.

    Raises:
        ValueError: a sequence of another length, or a negative seed.
        TypeError: a seed that is neither an integer nor None.
    """
    if seed is None:
        return [None] * num_rows
    if isinstance(seed, (int, np.integer)):
        seeds: list[int | None] = [int(seed) + i for i in range(num_rows)]
    else:
        seeds = list(seed)
        if len(seeds) != num_rows:
            raise ValueError(f"seed: got {len(seeds)} seeds, need one per row ({num_rows})")
    for row, value in enumerate(seeds):
        if value is None:
            continue
        if not isinstance(value, (int, np.integer)):
            raise TypeError(f"seed: row {row} has {value!r}; allowed: integers >= 0 or None")
        if value < 0:
            raise ValueError(f"seed: row {row} has {value}; allowed: integers >= 0 or None")
        seeds[row] = int(value)
    return seeds
