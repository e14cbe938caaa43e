"""Batches for bare d3rlpy, which training is compared with."""

from __future__ import annotations

import numpy as np
from d3rlpy.dataset import TransitionMiniBatch

from offline.datasets import Dataset
from offline.spaces import Spaces


def numpy_batch(dataset: Dataset, spaces: Spaces, rows: np.ndarray) -> TransitionMiniBatch:
    """The given rows as d3rlpy's own ``algo.update`` takes them, unscaled."""
    ends = dataset.terminals | dataset.timeouts
    actions = spaces.encode_actions(dataset.actions[rows])
    following = spaces.encode_actions(dataset.actions[np.minimum(rows + 1, len(dataset) - 1)])
    return TransitionMiniBatch(
        observations=spaces.encode(dataset.observations[rows]),
        actions=actions,
        rewards=dataset.rewards[rows, None],
        next_observations=spaces.encode(dataset.next_observations[rows]),
        next_actions=np.where(ends[rows, None], np.float32(0), following),
        terminals=dataset.terminals[rows, None].astype(np.float32),
        intervals=np.ones((len(rows), 1), np.float32),
        transitions=[],
    )
