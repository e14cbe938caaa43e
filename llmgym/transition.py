"""What an environment of this package is made of: a transition over a batch of rows.

A `BatchedTransition` holds the state of N rows in arrays and knows how to reset and step some of
them. `llmgym.vector.BatchVectorEnv` makes it a native Gymnasium vector environment and
`llmgym.scalar.BatchOfOneEnv` an ordinary one, so the two cannot differ: row i of a vector
environment seeded with s is the scalar environment seeded with s + i.
"""

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete, Text
from numpy.typing import NDArray

from llmgym.row_random import FloatArray, IntArray, RowRandom

BoolArray = NDArray[np.bool_]
# Values [k, ...] of k rows. Where only some of them have a key, a mask ``_key`` (bool [k]) says which.
# A value that all rows share is a view of one row, made by np.broadcast_to: it is not copied per row.
RowInfo = dict[str, NDArray[Any]]


def is_shared(values: NDArray[Any]) -> bool:
    """Whether `values` [k, ...] is one row shown k times, as np.broadcast_to makes it."""
    return values.ndim > 1 and values.strides[0] == 0 and not values.flags.writeable


class BatchedTransition(Protocol):
    """The dynamics of N independent rows, all state in arrays (so that it pickles).

    `rows` are distinct row numbers [k]; everything given or returned for them has k entries in
    that order. Returned arrays are never views of the state. Randomness is drawn from `random`
    for the rows concerned and from nothing else.
    """

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one row."""

    @property
    def action_space(self) -> Discrete | Text:
        """Of one row."""

    @property
    def num_tasks(self) -> int:
        """Task ids run from 0 to this less one."""

    def reset_rows(self, rows: IntArray, random: RowRandom, task_ids: IntArray | None) -> RowInfo:
        """Start an episode in `rows`, with the tasks given or drawn; returns the info."""

    def step_rows(
        self, rows: IntArray, random: RowRandom, actions: NDArray[Any]
    ) -> tuple[FloatArray, BoolArray, RowInfo]:
        """Step `rows`, whose episodes run and whose actions are valid: integers [k], or objects [k] of texts.

        Returns rewards [k], terminated [k], info.
        """

    def observe(self, rows: IntArray) -> NDArray[Any] | tuple[str, ...]:
        """The observations of `rows`, [k, ...], of exactly the space's dtype; a tuple of k, if texts."""
