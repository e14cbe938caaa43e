"""Replay data: every transition that a new agent meets while it is trained, in the order of training.

This is D4RL's "replay" data (Fu et al. 2020, section 5), from random actions to whatever the agent has
learned by the end: SAC for continuous actions, DQN for discrete ones.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box

import agents
from agents.env_state import dump_environment, load_environment
from agents.files import replace_file
from agents.sb3 import learn_in_folder, load_sb3

HIDDEN = [128, 128]
RANDOM_STEPS = 5_000  # of uniformly drawn actions before training begins, at most a tenth of all
SAVE_EVERY = 20_000  # steps; at some 8 ms each, so much work a stop can cost
REPORT_EVERY = 500  # steps between two reports of progress
BUFFER_FIELDS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def record_replay(
    env: gym.Env, steps: int, seed: int, folder: Path, on_rows: Callable[[int], None]
) -> dict[str, np.ndarray]:
    """Train an agent for so many steps and return what it met.

    A training that was stopped goes on from the state that ``folder`` holds, to the same rows as one that
    never stopped. That state is a pickle, which can run code when it is read: the folder must be one's own.

    Args:
        env: plain, with Box or Discrete actions.
        on_rows: called now and then with the number of rows that were added.

    Returns:
        as `offline.recorder.record`.
    """
    name = "sb3:SAC" if isinstance(env.action_space, Box) else "sb3:DQN"
    if (folder / "state.pkl").exists():
        model = _continue(name, env, folder)
    else:
        model = agents.make(
            name, env, seed=seed, buffer_size=steps, learning_starts=min(RANDOM_STEPS, steps // 10),
            policy_kwargs={"net_arch": HIDDEN},
        )  # fmt: skip
    done = saved = model.num_timesteps
    on_rows(done)

    def between_steps(model: Any, step: int) -> None:
        nonlocal done, saved
        on_rows(step - done)
        done = step
        if saved + SAVE_EVERY <= step < steps:
            _save(model, folder)
            saved = step

    learn_in_folder(model, steps, folder, False, REPORT_EVERY, between_steps)
    return _columns(model, steps)


def _save(model: Any, folder: Path) -> None:
    """Everything that the following steps depend on, in one file that is whole or not there."""
    part = folder / "part.zip"
    model.save(part)
    n, buffer = model.replay_buffer.size(), model.replay_buffer
    state = {
        "model": part.read_bytes(),
        "last_obs": model._last_obs,
        "buffer": {field: getattr(buffer, field)[:n] for field in BUFFER_FIELDS},
        "env": dump_environment(model.get_env().envs[0]),
        "action_space": model.action_space.np_random.bit_generator.state,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    with replace_file(folder / "state.pkl", "wb") as file:
        pickle.dump(state, file, protocol=pickle.HIGHEST_PROTOCOL)
    part.unlink()


def _continue(name: str, env: gym.Env, folder: Path) -> Any:
    with open(folder / "state.pkl", "rb") as file:
        state = pickle.load(file)
    (folder / "part.zip").write_bytes(state["model"])
    model: Any = load_sb3(name, folder / "part.zip", env)
    buffer, n = model.replay_buffer, len(state["buffer"]["rewards"])
    for field, values in state["buffer"].items():
        getattr(buffer, field)[:n] = values
    buffer.pos = n
    # Loading seeds all generators anew and forgets where the environment was: what was saved comes last.
    model._last_obs = state["last_obs"]
    load_environment(model.get_env().envs[0], state["env"])  # with SB3's Monitor around it
    model.action_space.np_random.bit_generator.state = state["action_space"]
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    return model


def _columns(model: Any, steps: int) -> dict[str, np.ndarray]:
    buffer = model.replay_buffer
    columns = {field: getattr(buffer, field)[:steps, 0] for field in BUFFER_FIELDS}
    actions = columns["actions"]
    if isinstance(model.action_space, Box):
        # SB3 keeps them stretched to [-1, 1].
        low, high = model.action_space.low, model.action_space.high
        actions = np.clip(model.policy.unscale_action(actions), low, high)
    else:
        actions = actions[:, 0] + int(model.action_space.start)
    observations, following = columns["observations"], columns["next_observations"]
    if isinstance(model.observation_space, gym.spaces.Discrete):
        observations, following = observations[:, 0], following[:, 0]
    if np.issubdtype(observations.dtype, np.floating):
        observations, following = observations.astype(np.float32), following.astype(np.float32)
    ended, timeouts = columns["dones"] > 0, columns["timeouts"] > 0
    missing = np.full(steps, np.nan)  # nobody knows with which probability it acted
    return {
        "observations": observations,
        "actions": actions,
        "rewards": columns["rewards"],
        "next_observations": following,
        "terminals": ended & ~timeouts,
        "timeouts": timeouts,
        "infos/reset_seed": np.full(steps, -1, np.int64),
        "infos/ref_logp": missing,
        "infos/behaviour_logp": missing,
    }
