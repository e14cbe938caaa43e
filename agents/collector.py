"""The loop that fills rollouts, on any Gymnasium ``VectorEnv`` in any autoreset mode.

Nothing produces experience except ``reset`` and ``step``, and `Collector` is their only caller, so an
algorithm sees the same record whichever mode an environment uses.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from agents.policies.base import Policy, log_prob_of
from agents.policies.spaces import decode_actions, encode_observations
from agents.rollout import Episodes, Rollout
from llmgym.vector import AutoresetMode, BatchVectorEnv, autoreset_mode


def _info_rows(infos: Any, key: str, n_envs: int) -> np.ndarray:
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
    rows = _info_rows(infos, key, len(done))
    if mode is AutoresetMode.SAME_STEP and done.any():
        rows = np.where(done, _info_rows(infos.get("final_info"), key, len(done)), rows)
    return rows


@dataclass
class _Recording:
    """What `Collector` appends step by step; stacked into a `Rollout` at the end."""

    observations: list[Tensor] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)
    rewards: list[np.ndarray] = field(default_factory=list)
    terminated: list[np.ndarray] = field(default_factory=list)
    truncated: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    ref_logp: list[np.ndarray] = field(default_factory=list)
    task_ids: list[np.ndarray] = field(default_factory=list)
    env_steps: int = 0
    # (step, row, observation) of truncated steps: what the value bootstraps from.
    finals: list[tuple[int, int, Any]] = field(default_factory=list)


_STATE = (
    "policy_version", "recent_returns", "recent_lengths", "_seed", "_observation", "_idle", "_returns",
    "_lengths",
)


class Collector:
    """Steps a vector environment with a policy and records `Rollout`s.

    The log-probs and values of a rollout come from one batched forward of the policy at its end, not
    from one small forward per step: nothing changes the weights in between, and the first pass of the
    update then sees a probability ratio of exactly 1.

    Args:
        env: a Gymnasium VectorEnv in any autoreset mode.
        policy: samples the actions.
        generator: torch generator for the actions.
        seed: of the first reset; row i is seeded ``seed + i``. None leaves it to the environment.
        reference: policy whose log-probs are recorded; None reads ``info["ref_logp"]`` where the
            environment gives it.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        generator: torch.Generator,
        seed: int | None,
        reference: Policy | None = None,
    ) -> None:
        self.env = env
        self.policy = policy
        self.generator = generator
        self.reference = reference
        self.mode = autoreset_mode(env)
        # Without autoreset this package's environments let a finished row wait for the others;
        # Gymnasium's own refuse to step it.
        self._rows_wait = isinstance(env.unwrapped, BatchVectorEnv)
        self.policy_version = 0
        self.recent_returns: deque[float] = deque(maxlen=100)
        self.recent_lengths: deque[int] = deque(maxlen=100)
        self._seed = seed
        self._observation: Any = None
        # Rows whose action the environment ignores: a reset step, or waiting for the others.
        self._idle = np.zeros(env.num_envs, bool)
        # Return and length so far of the episode each row is in.
        self._returns = np.zeros(env.num_envs)
        self._lengths = np.zeros(env.num_envs, np.int64)

    def reset(self) -> None:
        """Start new episodes in all rows; unfinished ones are forgotten."""
        self._observation, _ = self.env.reset(seed=self._seed)
        self._seed = None  # later resets continue the environment's own random stream
        self._idle[:] = False
        self._returns[:] = 0.0
        self._lengths[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout depends on, besides the environment, the policy and the generator."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, in an environment whose state was restored too."""
        for name in _STATE:
            setattr(self, name, state[name])

    def restart(self, seed: int) -> None:
        """Forget all unfinished episodes; the next reset seeds row i with ``seed + i``."""
        self._seed, self._observation = seed, None

    def collect(self, n_steps: int) -> Rollout:
        """Take ``n_steps`` vector steps from where the last rollout ended."""
        if self._observation is None:
            self.reset()
        recording = _Recording()
        everything = np.ones(self.env.num_envs, bool)
        for _ in range(n_steps):
            self._step(recording, everything)
        return self._finish(recording)

    def collect_episodes(self, per_row: int) -> Rollout:
        """Restart every row and record its first ``per_row`` whole episodes.

        Taking a fixed number of episodes from each row, rather than the first ones to finish, keeps
        long episodes from being under-represented. Steps of a row that already has its episodes are
        masked.
        """
        self.reset()
        recording = _Recording()
        missing = np.full(self.env.num_envs, per_row)
        while (missing > 0).any():
            missing -= self._step(recording, missing > 0)
        # Whatever rows went on to do beyond their last episode is not part of any record.
        self._observation = None
        return self._finish(recording)

    def _step(self, recording: _Recording, wanted: np.ndarray) -> np.ndarray:
        """One vector step; records the rows in ``wanted``. Returns which recorded rows ended."""
        env = self.env
        if self.mode is AutoresetMode.DISABLED and self._idle.any() and (
            self._idle.all() or not self._rows_wait
        ):
            # Not `reset`: returns of episodes that earlier rollouts began are still to be added up.
            self._observation, _ = env.reset(options={"reset_mask": self._idle})
            self._idle = np.zeros_like(self._idle)
        observation = encode_observations(env.single_observation_space, self._observation)
        with torch.inference_mode():
            action = self.policy.sample(observation, self.generator)
        step = env.step(decode_actions(env.single_action_space, action))
        self._observation, reward, terminated, truncated, infos = step

        t = len(recording.rewards)
        executed = wanted & ~self._idle
        recording.env_steps += self._idle.size - int(self._idle.sum())
        if not np.isfinite(reward).all():
            bad = int(np.flatnonzero(~np.isfinite(reward))[0])
            raise ValueError(
                f"reward={reward[bad]} of environment row {bad} at step {t} of the rollout; "
                "rewards must be finite numbers"
            )
        ended = terminated | truncated
        done = ended & ~self._idle
        if done.any():
            same_step = self.mode is AutoresetMode.SAME_STEP
            final = infos["final_obs"] if same_step else self._observation
            for row in np.flatnonzero(truncated & ~terminated & executed):
                recording.finals.append((t, int(row), np.array(final[row])))
        if self.mode is AutoresetMode.NEXT_STEP:
            self._idle = done
        elif self.mode is AutoresetMode.DISABLED:
            self._idle = self._idle | done

        recording.observations.append(observation)
        recording.actions.append(action)
        recording.rewards.append(np.where(executed, reward, 0.0))
        recording.terminated.append(terminated & executed)
        recording.truncated.append(truncated & executed)
        recording.mask.append(executed)
        recording.ref_logp.append(step_info(infos, "ref_logp", done, self.mode))
        recording.task_ids.append(step_info(infos, "task_id", done, self.mode))
        return done & executed

    def _finish(self, recording: _Recording) -> Rollout:
        """Stack a recording, evaluate the policy on it once, and build the table of episodes."""
        rewards, mask = np.stack(recording.rewards), np.stack(recording.mask)
        terminated, truncated = np.stack(recording.terminated), np.stack(recording.truncated)
        observations, actions = torch.stack(recording.observations), torch.stack(recording.actions)
        episodes, episode_index = self._episodes(
            rewards, mask, terminated | truncated, np.stack(recording.task_ids)
        )

        shape = tuple(mask.shape)
        flat_observations, flat_actions = observations.flatten(0, 1), actions.flatten(0, 1)
        with torch.no_grad():
            evaluation = self.policy.evaluate(flat_observations, flat_actions)
            values = evaluation.value.view(shape)
            next_values = torch.cat([values[1:], self._bootstrap_values(recording, shape[1])])
            if recording.finals:
                steps, rows, finals = zip(*recording.finals, strict=True)
                encoded = encode_observations(self.env.single_observation_space, np.stack(finals))
                next_values[list(steps), list(rows)] = self.policy.value(encoded)
        return Rollout(
            observations=observations,
            actions=actions,
            log_probs=evaluation.log_prob.view(shape),
            ref_log_probs=self._reference_log_probs(recording, flat_observations, flat_actions, mask),
            values=values,
            next_values=next_values,
            rewards=torch.as_tensor(rewards, dtype=torch.float32),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            mask=torch.from_numpy(mask),
            episode_index=torch.from_numpy(episode_index),
            episodes=episodes,
            policy_version=self.policy_version,
            env_steps=recording.env_steps,
        )

    def _bootstrap_values(self, recording: _Recording, n_envs: int) -> Tensor:
        """V of the observation behind the last step, [1, N]; zeros where every row has ended there."""
        if self._observation is None:
            return torch.zeros(1, n_envs)
        space = self.env.single_observation_space
        return self.policy.value(encode_observations(space, self._observation)).unsqueeze(0)

    def _reference_log_probs(
        self, recording: _Recording, observations: Tensor, actions: Tensor, mask: np.ndarray
    ) -> Tensor | None:
        if self.reference is not None:
            return log_prob_of(self.reference, observations, actions).view(mask.shape)
        ref_logp = np.stack(recording.ref_logp)
        if np.isnan(ref_logp[mask]).any():
            return None
        return torch.as_tensor(np.where(mask, ref_logp, 0.0), dtype=torch.float32)

    def _episodes(
        self, rewards: np.ndarray, mask: np.ndarray, ends: np.ndarray, task_ids: np.ndarray
    ) -> tuple[Episodes, np.ndarray]:
        """Table of the episodes that ended, and the row of it that each step belongs to."""
        steps, rows = np.nonzero(ends)  # time-major: the order of completion
        n_episodes = len(steps)
        number = np.full(ends.shape, n_episodes)
        number[steps, rows] = np.arange(n_episodes)
        # A step belongs to the next episode end in its row.
        upcoming = np.minimum.accumulate(number[::-1], axis=0)[::-1]
        finished = mask & (upcoming < n_episodes)
        index = np.where(finished, upcoming, -1)
        returns = np.bincount(index[finished], rewards[finished], n_episodes).astype(np.float64)
        lengths = np.bincount(index[finished], minlength=n_episodes)

        # The first end in a row completes the episode that earlier rollouts began.
        ending = np.flatnonzero(upcoming[0] < n_episodes)
        returns[upcoming[0, ending]] += self._returns[ending]
        lengths[upcoming[0, ending]] += self._lengths[ending]
        self._returns[ending] = 0.0
        self._lengths[ending] = 0
        unfinished = mask & ~finished
        self._returns += (rewards * unfinished).sum(0)
        self._lengths += unfinished.sum(0)

        self.recent_returns.extend(returns.tolist())
        self.recent_lengths.extend(lengths.tolist())
        tasks = task_ids[steps, rows]
        return Episodes(returns, lengths, np.where(np.isnan(tasks), -1, tasks).astype(int)), index
