"""The rollout: one record of experience for every agent.

`agents.collector` fills it; nothing else produces experience.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class Episodes:
    """One row per episode that ended in a rollout, in order of completion.

    ======================  =======  ==============================================================
    field                   shape    meaning
    ======================  =======  ==============================================================
    returns                 [E]      undiscounted sum of the environment's rewards
    lengths                 [E]      number of steps
    task_ids                [E]      ``info["task_id"]`` of the last step, -1 where not given
    ======================  =======  ==============================================================
    """

    returns: np.ndarray
    lengths: np.ndarray
    task_ids: np.ndarray


@dataclass
class Rollout:
    """Experience of T steps in N environments, time-major, without gradient.

    ======================  ===========  ==========================================================
    field                   shape        meaning
    ======================  ===========  ==========================================================
    observations            [T, N, ...]  encoded: float32 [T, N, D] or int64 [T, N]
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

    @property
    def n_steps(self) -> int:
        """Number of steps in the record; ``env_steps`` counts those that had to be taken for it."""
        return int(self.mask.sum())

    def flat(self, x: Tensor) -> Tensor:
        """The executed steps of a field as one batch [B, ...], in time-major order."""
        return x[self.mask]
