"""Small records with every kind of episode, and their comparison, field by field."""

from __future__ import annotations

from typing import Any

import numpy as np

from offline.datasets import Dataset, make_dataset

# Of each episode: its length, and whether a terminal ends it (else it was cut).
EPISODES = ((4, True), (1, True), (3, False), (1, False), (5, True), (2, False))
FIELDS = (
    "observations", "actions", "rewards", "next_observations", "terminals", "timeouts", "episode_index",
    "next_known",
)  # fmt: skip


def columns(episodes: Any = EPISODES, stored: bool = True) -> dict[str, Any]:
    """Flat arrays in which every observation is its own number: episode e, step t has 100 e + t."""
    observations, following, terminals, timeouts = [], [], [], []
    for episode, (length, terminal) in enumerate(episodes):
        steps = 100 * episode + np.arange(length + 1)
        observations.append(steps[:-1])
        following.append(steps[1:])
        end = np.arange(length) == length - 1
        terminals.append(end & terminal)
        timeouts.append(end & (not terminal))
    n = sum(length for length, _ in episodes)
    rng = np.random.default_rng(0)

    def pair(numbers: list[np.ndarray]) -> np.ndarray:
        flat = np.concatenate(numbers).astype(np.float32)
        return np.stack([flat, -flat], axis=1)

    return {
        "observations": pair(observations), "actions": rng.uniform(-1, 1, (n, 3)).astype(np.float32),
        "rewards": np.arange(n, dtype=np.float32) + 0.5, "terminals": np.concatenate(terminals),
        "timeouts": np.concatenate(timeouts), "next_observations": pair(following) if stored else None,
    }  # fmt: skip


def record(episodes: Any = EPISODES, stored: bool = True, **further: Any) -> Dataset:
    return make_dataset(**columns(episodes, stored), **further)


def assert_same(first: Dataset, second: Dataset) -> None:
    """Every row array has the same dtype and values."""
    for name in FIELDS:
        a, b = getattr(first, name), getattr(second, name)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert first.infos.keys() == second.infos.keys()
    for name, values in first.infos.items():
        assert values.dtype == second.infos[name].dtype, name
        np.testing.assert_array_equal(values, second.infos[name], err_msg=name)
