"""What a collector writes down step by step, and how that becomes the arrays of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.rollout import Episodes
from llmgym.vector import AutoresetMode


def info_rows(infos: Any, key: str, n_envs: int) -> np.ndarray:
    """``infos[key]`` as float [N], NaN where a row does not have it."""
    rows = np.full(n_envs, np.nan)
    if isinstance(infos, dict) and key in infos:
        present = np.asarray(infos.get("_" + key, np.ones(n_envs)), dtype=bool)
        rows[present] = np.asarray(infos[key], dtype=np.float64)[present]
    return rows


def step_info(infos: dict[str, Any], key: str, done: np.ndarray, mode: AutoresetMode) -> np.ndarray:
    """``info[key]`` of the step just taken, float [N], NaN where a row does not have it.

    Under same-step autoreset the top level of ``infos`` describes the next episode of a finished row;
    its last step is in ``final_info``.
    """
    if not infos:
        return np.full(len(done), np.nan)
    rows = info_rows(infos, key, len(done))
    if mode is AutoresetMode.SAME_STEP and done.any():
        rows = np.where(done, info_rows(infos.get("final_info"), key, len(done)), rows)
    return rows


def final_info(infos: dict[str, Any], rows: np.ndarray, mode: AutoresetMode) -> dict[str, np.ndarray]:
    """Numbers (float, NaN) and texts ("") of the last step's info of ``rows`` [k], where they have them."""
    source = infos.get("final_info", {}) if mode is AutoresetMode.SAME_STEP else infos
    found: dict[str, np.ndarray] = {}
    for key, values in source.items():
        present = source.get("_" + key)
        if key.startswith("_") or present is None or getattr(values, "ndim", None) != 1:
            continue
        kept, present = values[rows], np.asarray(present, bool)[rows]
        if kept.dtype == object and all(isinstance(value, str) for value in kept[present]):
            kept = kept.astype(str)
        if kept.dtype.kind == "U":
            found[key] = np.where(present, kept, "")
        elif kept.dtype.kind in "biuf":
            found[key] = np.where(present, kept, np.nan)
    return found


def join_info(parts: list[tuple[int, dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """One array per key over all parts of k rows; a part without a key has NaN or "" there."""
    examples = {key: values for _, part in parts for key, values in part.items()}

    def column(key: str) -> np.ndarray:
        missing = "" if examples[key].dtype.kind == "U" else np.nan
        return np.concatenate([part.get(key, np.full(k, missing)) for k, part in parts])

    return {key: column(key) for key in sorted(examples)}


@dataclass
class Recording:
    """Steps of N environments, each list one entry a vector step; see `agents.rollout.Rollout`."""

    observations: list[Tensor] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)
    rewards: list[np.ndarray] = field(default_factory=list)
    terminated: list[np.ndarray] = field(default_factory=list)
    truncated: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    ref_logp: list[np.ndarray] = field(default_factory=list)
    task_ids: list[np.ndarray] = field(default_factory=list)
    group_ids: list[np.ndarray] = field(default_factory=list)
    env_steps: int = 0
    # (step, row, observation) of truncated steps: what the value bootstraps from.
    finals: list[tuple[int, int, Any]] = field(default_factory=list)
    # Of the episodes that ended, in order of completion: the observation of the last action, for
    # policies that read whole sequences, and (number of episodes, their last info) of each step.
    sequences: list[Tensor] = field(default_factory=list)
    infos: list[tuple[int, dict[str, np.ndarray]]] = field(default_factory=list)

    def episodes(self, returns: np.ndarray, lengths: np.ndarray) -> tuple[Episodes, np.ndarray]:
        """The table of the episodes that ended, and the row of it that each step belongs to, [T, N].

        Args:
            returns, lengths: [N], of the part that earlier rollouts hold of each row's episode; changed
                in place to those of the episodes that this recording leaves unfinished.
        """
        rewards, mask = np.stack(self.rewards), np.stack(self.mask)
        ends = np.stack(self.terminated) | np.stack(self.truncated)
        steps, rows = np.nonzero(ends)  # time-major: the order of completion
        n_episodes = len(steps)
        number = np.full(ends.shape, n_episodes)
        number[steps, rows] = np.arange(n_episodes)
        # A step belongs to the next episode end in its row.
        upcoming = np.minimum.accumulate(number[::-1], axis=0)[::-1]
        finished = mask & (upcoming < n_episodes)
        index = np.where(finished, upcoming, -1)
        episode_returns = np.bincount(index[finished], rewards[finished], n_episodes).astype(np.float64)
        episode_lengths = np.bincount(index[finished], minlength=n_episodes)

        # The first end in a row completes the episode that earlier rollouts began.
        ending = np.flatnonzero(upcoming[0] < n_episodes)
        episode_returns[upcoming[0, ending]] += returns[ending]
        episode_lengths[upcoming[0, ending]] += lengths[ending]
        returns[ending], lengths[ending] = 0.0, 0
        unfinished = mask & ~finished
        returns += (rewards * unfinished).sum(0)
        lengths += unfinished.sum(0)

        tasks = np.stack(self.task_ids)[steps, rows]
        info = join_info(self.infos)
        cut = np.stack(self.truncated)[steps, rows]
        if "stop_reason" in info:
            cut = cut | (info["stop_reason"] == "length")
        table = Episodes(
            returns=episode_returns,
            lengths=episode_lengths,
            task_ids=np.where(np.isnan(tasks), -1, tasks).astype(int),
            group_ids=np.stack(self.group_ids)[steps, rows],
            cut=cut,
            info=info,
        )
        return table, index

    def reference(self) -> Tensor | None:
        """``info["ref_logp"]`` [T, N] of the recorded steps; None where one lacks it."""
        ref_logp, mask = np.stack(self.ref_logp), np.stack(self.mask)
        if np.isnan(ref_logp[mask]).any():
            return None
        return torch.as_tensor(np.where(mask, ref_logp, 0.0), dtype=torch.float32)
