"""Settings with which each library's PPO reaches a mean return of 475 on CartPole-v1 soonest."""

from __future__ import annotations

from typing import Any

from common.control import ZOO_CARTPOLE, ZOO_N_ENVS

OURS_BEST: dict[str, Any] = ZOO_CARTPOLE | {
    "env": "sync", "n_envs": ZOO_N_ENVS, "total_timesteps": 100_000
}
SB3_BEST: dict[str, Any] = ZOO_CARTPOLE | {
    "env": "dummy", "n_envs": ZOO_N_ENVS, "total_timesteps": 100_000
}
