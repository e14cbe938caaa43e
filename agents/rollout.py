"""The rollout: one record of experience for every agent.

`agents.collector` fills it; nothing else produces experience.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

EPISODE_FIELDS = ("returns", "lengths", "task_ids", "group_ids", "cut")
STEP_FIELDS = (
    "actions", "log_probs", "values", "next_values", "rewards", "terminated", "truncated", "mask",
)  # fmt: skip


@dataclass
class Episodes:
    """One row per episode that ended in a rollout, in order of completion.

    ======================  =======  ==============================================================
    field                   shape    meaning
    ======================  =======  ==============================================================
    returns                 [E]      undiscounted sum of the environment's rewards
    lengths                 [E]      number of steps
    task_ids                [E]      ``info["task_id"]`` of the last step, -1 where not given
    group_ids               [E]      episodes of one task that are compared with each other; -1: none
    cut                     [E]      bool: ended by a limit (truncated, or ``stop_reason`` "length")
    info                    {key:    numbers (NaN: missing) and texts of the last step's info, such as
                            [E]}     the components of a reward
    ======================  =======  ==============================================================
    """

    returns: np.ndarray
    lengths: np.ndarray
    task_ids: np.ndarray
    group_ids: np.ndarray
    cut: np.ndarray
    info: dict[str, np.ndarray]

    def select(self, index: np.ndarray) -> Episodes:
        """The episodes at ``index`` (numbers or a mask)."""
        columns = {name: getattr(self, name)[index] for name in EPISODE_FIELDS}
        return Episodes(**columns, info={key: values[index] for key, values in self.info.items()})


@dataclass
class Rollout:
    """Experience of T steps in N environments, time-major, without gradient.

    ======================  ===========  ==========================================================
    field                   shape        meaning
    ======================  ===========  ==========================================================
    observations            [T, N, ...]  encoded: float32 [T, N, D] or int64 [T, N]. Of a policy that
                                         reads sequences int64 [E, L]: for each episode the observation
                                         of its last action, which holds the prompt and all before it
    actions                 [T, N, ...]  as sampled (a Box action before clipping to its bounds)
    log_probs               [T, N]       of the policy that sampled them, ``policy_version``
    ref_log_probs           [T, N]       of the reference policy; None where nobody knows it
    values                  [T, N]       V(s_t) at collection
    next_values             [T, N]       V of the true next observation (see `agents.advantages`)
    rewards                 [T, N]       the environment's, before any KL penalty
    terminated, truncated   [T, N]       bool
    mask                    [T, N]       bool: an action was executed and counts
    episode_index           [T, N]       row of ``episodes`` a step belongs to, -1 if unfinished
    policy_version          int          of the policy that sampled the actions
    env_steps               int          environment steps taken: also those of rows that went on while
                                         others finished the episodes that were asked for
    sequences               bool         whether observations are one per episode
    ======================  ===========  ==========================================================
    """

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    ref_log_probs: Tensor | None
    values: Tensor
    next_values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    episode_index: Tensor
    episodes: Episodes
    policy_version: int
    env_steps: int
    sequences: bool = False

    @property
    def n_steps(self) -> int:
        """Number of steps in the record; ``env_steps`` counts those that had to be taken for it."""
        return int(self.mask.sum())

    def flat(self, x: Tensor) -> Tensor:
        """The executed steps of a field as one batch [B, ...], in time-major order."""
        return x[self.mask]


def steps_of_episodes(episode_index: Tensor, n_episodes: int) -> tuple[Tensor, Tensor]:
    """Where the steps of each episode are.

    Args:
        episode_index: [T, N], the episode of each step, -1 for steps of none.

    Returns:
        index [E, K], positions in the flattened [T * N] of each episode's steps in order, 0 behind its
        end; mask [E, K], 1 where there is a step. K is the length of the longest episode.
    """
    n_rows = episode_index.shape[1]
    by_row = episode_index.T.reshape(-1)  # the steps of an episode are in one row, in order
    order = torch.argsort(torch.where(by_row < 0, n_episodes, by_row), stable=True)
    order = order[: int((by_row >= 0).sum())]
    lengths = torch.bincount(by_row[order], minlength=n_episodes)
    mask = torch.arange(int(lengths.max()) if n_episodes else 0) < lengths.unsqueeze(1)
    index = torch.zeros(mask.shape, dtype=torch.int64)
    n_steps = len(episode_index)
    index[mask] = order % n_steps * n_rows + order // n_steps
    return index, mask


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """Rollouts of one policy version one after the other; episodes are numbered through."""
    if len(rollouts) == 1:
        return rollouts[0]
    first = rollouts[0]
    fields: dict[str, Any] = {name: torch.cat([getattr(r, name) for r in rollouts]) for name in STEP_FIELDS}
    index, start = [], 0
    for rollout in rollouts:
        index.append(torch.where(rollout.episode_index < 0, -1, rollout.episode_index + start))
        start += len(rollout.episodes.returns)
    references = [r.ref_log_probs for r in rollouts if r.ref_log_probs is not None]
    return replace(
        first,
        observations=torch.cat([r.observations for r in rollouts]),
        ref_log_probs=torch.cat(references) if len(references) == len(rollouts) else None,
        episode_index=torch.cat(index),
        episodes=_concatenate_episodes([r.episodes for r in rollouts]),
        env_steps=sum(r.env_steps for r in rollouts),
        **fields,
    )


def _concatenate_episodes(tables: list[Episodes]) -> Episodes:
    def missing(table: Episodes, like: np.ndarray) -> np.ndarray:
        return np.full(len(table.returns), "" if like.dtype.kind == "U" else np.nan)

    info = {}
    for key in sorted({key for table in tables for key in table.info}):
        like = next(table.info[key] for table in tables if key in table.info)
        info[key] = np.concatenate([t.info.get(key, missing(t, like)) for t in tables])
    columns = {name: np.concatenate([getattr(t, name) for t in tables]) for name in EPISODE_FIELDS}
    return Episodes(**columns, info=info)
