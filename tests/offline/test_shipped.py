"""The behaviour policies that are shipped: small, and at the level that D4RL calls medium."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mujoco")

from offline.behaviour import WEIGHTS, BehaviourPolicy  # noqa: E402
from offline.collect import collect  # noqa: E402
from offline.datasets import episode_lengths, episode_returns  # noqa: E402
from offline.train_behaviour import MEDIUM_RETURNS  # noqa: E402


@pytest.mark.parametrize("env_id", MEDIUM_RETURNS)
def test_a_medium_policy_is_small_and_collects_at_its_level(env_id: str) -> None:
    path = WEIGHTS / f"{env_id}-medium.npz"
    assert path.stat().st_size <= 300 * 1024
    dataset = collect(env_id, "medium", steps=20_000, seed=11)
    cut = bool(dataset.timeouts[-1]) and episode_lengths(dataset)[-1] < 1000
    whole = episode_returns(dataset)[: -1 if cut else None]
    assert len(whole) >= 15
    # D4RL's level, and what the file says of itself, within four standard errors and a tenth.
    error = 4 * whole.std() / np.sqrt(len(whole))
    target = MEDIUM_RETURNS[env_id]
    assert abs(whole.mean() - target) < 0.1 * target + error
    assert abs(whole.mean() - BehaviourPolicy.load(path).about["mean_return"]) < 0.05 * target + error
