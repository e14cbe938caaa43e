"""Rows of a Gymnasium vector environment: reset chosen ones, split observations and infos.

What an adapter needs whose other side sees N environments and not one batch. Observations may be
nested dicts of arrays ``[N, ...]`` (``Dict`` spaces).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import SyncVectorEnv, VectorEnv

from llmgym.vector import AutoresetMode, BatchVectorEnv, autoreset_mode

# Resets the rows of a mask [N] and no others: {row: (reset observation, reset info)}.
RowReset = Callable[[np.ndarray], dict[int, tuple[Any, dict[str, Any]]]]


def row_reset(env: VectorEnv) -> RowReset | None:
    """How to reset chosen rows of ``env``; None where it resets them itself within the step."""
    mode = autoreset_mode(env)
    if mode == AutoresetMode.SAME_STEP:
        return None
    if mode == AutoresetMode.DISABLED or isinstance(env, BatchVectorEnv):

        def reset_masked(mask: np.ndarray) -> dict[int, tuple[Any, dict[str, Any]]]:
            observation, info = env.reset(options={"reset_mask": mask.copy()})
            infos = split_info(info, env.num_envs)
            return {i: (take_row(observation, i), infos[i]) for i in row_indices(mask)}

        return reset_masked
    if isinstance(env, SyncVectorEnv):

        def reset_sub_envs(mask: np.ndarray) -> dict[int, tuple[Any, dict[str, Any]]]:
            # The flag says that the next step is to be the reset of this row: it has had it.
            env._autoreset_envs[mask] = False
            return {i: env.envs[i].reset() for i in row_indices(mask)}

        return reset_sub_envs
    if isinstance(env, CartPoleVectorEnv):

        def reset_cartpole(mask: np.ndarray) -> dict[int, tuple[Any, dict[str, Any]]]:
            # What its own next step would do to these rows, with the same draws.
            size = (4, int(mask.sum()))
            state: np.ndarray = env.state  # type: ignore[assignment]  # None only before reset
            state[:, mask] = env.np_random.uniform(low=env.low, high=env.high, size=size)
            env.steps[mask], env.prev_done[mask] = 0, False
            rows = state.T.astype(np.float32)
            return {i: (rows[i], {}) for i in row_indices(mask)}

        return reset_cartpole
    raise ValueError(
        f"{env} has next-step autoreset and steps all rows while it resets one, but SB3 needs the "
        "reset observation of a finished row at once. Allowed: a same-step or disabled environment "
        '(autoreset_mode="same_step"), gym.make_vec(..., vectorization_mode="sync") without vector '
        "wrappers, or a scalar environment"
    )


def row_indices(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


def copy_observation(observation: Any, space: gym.Space) -> Any:
    """A batch of observations in the space's dtype that shares no memory with the environment."""
    if isinstance(space, gym.spaces.Dict):
        return {k: copy_observation(observation[k], sub) for k, sub in space.spaces.items()}
    return np.array(observation, dtype=space.dtype)


def take_row(observation: Any, i: int) -> Any:
    if isinstance(observation, dict):
        return {key: take_row(value, i) for key, value in observation.items()}
    row = observation[i]
    # What nobody can write to, such as an action mask that all rows share, need not be copied.
    return row.copy() if isinstance(row, np.ndarray) and row.flags.writeable else row


def set_row(observation: Any, i: int, row: Any) -> None:
    if isinstance(observation, dict):
        for key, value in row.items():
            set_row(observation[key], i, value)
    else:
        observation[i] = row


def split_info(info: dict[str, Any], n_rows: int) -> list[dict[str, Any]]:
    """Gymnasium's vector info as one dict a row: key k is in row i only where ``_k[i]`` is true."""
    rows: list[dict[str, Any]] = [{} for _ in range(n_rows)]
    for key, value in info.items():
        if key.startswith("_") and key[1:] in info:
            continue
        values = value
        if isinstance(value, dict):
            values = split_info(value, n_rows)
        elif np.ndim(value) == 1:
            values = np.asarray(value).tolist()  # Python numbers, as a scalar environment gives
        for i in row_indices(info.get("_" + key, np.ones(n_rows, bool))):
            rows[i][key] = take_row(values, i)
    return rows
