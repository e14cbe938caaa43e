"""The loop that fills rollouts, on any Gymnasium ``VectorEnv`` in any autoreset mode.

Nothing produces experience except ``reset`` and ``step``, and `Collector` is their only caller, so an
algorithm sees the same record whichever mode an environment uses.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from agents.policies.base import Evaluation, Policy, reads_sequences
from agents.policies.spaces import decode_actions, encode_observations
from agents.recording import Recording, final_info, info_rows, step_info
from agents.rollout import Rollout, steps_of_episodes
from llmgym.vector import AutoresetMode, BatchVectorEnv, autoreset_mode

PADDING = -1  # an action behind the end of a response
EVALUATED_AT_ONCE = 32  # responses of about one length: padding costs what tokens do, and so do logits

_STATE = (
    "policy_version", "recent_returns", "recent_lengths", "_seed", "_observation", "_idle", "_returns",
    "_lengths",
)


class Collector:
    """Steps a vector environment with a policy and records `Rollout`s.

    The log-probs and values of a rollout come from one batched forward of the policy at its end, not
    from one small forward per step (a policy that reads sequences is evaluated on whole episodes, and its
    cache only serves to sample): nothing changes the weights in between, and the first pass of the
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
        # A policy that reads sequences decodes with a state (its cache) and is evaluated on whole episodes.
        self.sequences = reads_sequences(policy)
        self._decoding: Any = None
        self._groups = np.full(env.num_envs, -1)  # group of the episode each row is in
        # Rows whose action the environment ignores: a reset step, or waiting for the others.
        self._idle = np.zeros(env.num_envs, bool)
        # Return and length so far of the episode each row is in.
        self._returns = np.zeros(env.num_envs)
        self._lengths = np.zeros(env.num_envs, np.int64)

    def reset(self, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Start new episodes in all rows; unfinished ones are forgotten. Returns the environment's info."""
        self._observation, info = self.env.reset(seed=self._seed, options=options)
        self._seed = None  # later resets continue the environment's own random stream
        self._idle[:] = False
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return info

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
        """Take ``n_steps`` vector steps from where the last rollout ended.

        Raises:
            ValueError: the policy reads sequences, which are recorded whole (`collect_episodes`).
        """
        if self.sequences:
            raise ValueError("a policy that reads sequences is recorded in whole episodes: n_episodes")
        if self._observation is None:
            self.reset()
        recording = Recording()
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
        recording = Recording()
        self._record_episodes(recording, np.full(self.env.num_envs, per_row))
        return self._finish(recording)

    def draw_tasks(self, n: int) -> np.ndarray:
        """Task ids [n] as the environment itself draws them at a reset; -1 where it names no task."""
        drawn: list[float] = []
        while len(drawn) < n:
            ids = info_rows(self.reset(), "task_id", self.env.num_envs)
            drawn.extend(np.where(np.isnan(ids), -1, ids))
        self._observation = None
        return np.asarray(drawn[:n]).astype(int)

    def collect_tasks(self, task_ids: np.ndarray, group_ids: np.ndarray, greedy: bool = False) -> Rollout:
        """One whole episode of each task, as many at a time as there are rows.

        Args:
            task_ids: [M], for ``reset(options={"task_id": ...})``; -1: the environment has no tasks.
            group_ids: [M], recorded with the episodes.
            greedy: take the most probable action instead of sampling.
        """
        recording = Recording()
        for wave in self._waves(task_ids):
            count = len(wave)
            # Rows without an episode of this wave get the task of the last one, and are not recorded.
            rows = np.pad(wave, (0, self.env.num_envs - count), mode="edge")
            self.reset(self._task_options(task_ids[rows]))
            self._groups = group_ids[rows]
            missing = (np.arange(self.env.num_envs) < count).astype(int)
            self._record_episodes(recording, missing, greedy)
        self._groups = np.full(self.env.num_envs, -1)
        return self._finish(recording, greedy)

    def _waves(self, task_ids: np.ndarray) -> list[np.ndarray]:
        """Indices of the episodes that are run at the same time, at most one per row.

        Gymnasium's own vector environments pass the same options to every row: one task at a time.
        """
        n_rows = self.env.num_envs
        every = np.arange(len(task_ids))
        if self._rows_wait or (task_ids < 0).all():
            together = [every]
        else:
            together = [every[task_ids == task] for task in dict.fromkeys(task_ids.tolist())]
        return [part[i : i + n_rows] for part in together for i in range(0, len(part), n_rows)]

    def _task_options(self, task_ids: np.ndarray) -> dict[str, Any] | None:
        if (task_ids < 0).all():
            return None
        return {"task_id": task_ids if self._rows_wait else int(task_ids[0])}

    def _record_episodes(self, recording: Recording, missing: np.ndarray, greedy: bool = False) -> None:
        """Step until each row has as many whole episodes as ``missing`` [N] says, from a reset on."""
        if self.sequences:
            self._decoding = self.policy.new_state(self.env.num_envs)  # type: ignore[attr-defined]
        while (missing > 0).any():
            missing = missing - self._step(recording, missing > 0, greedy)
        # Whatever rows went on to do beyond their last episode is not part of any record.
        self._observation = None

    def _step(self, recording: Recording, wanted: np.ndarray, greedy: bool = False) -> np.ndarray:
        """One vector step; records the rows in ``wanted``. Returns which recorded rows ended."""
        env = self.env
        if self.mode is AutoresetMode.DISABLED and self._idle.any() and (
            self._idle.all() or not self._rows_wait
        ):
            # Not `reset`: returns of episodes that earlier rollouts began are still to be added up.
            self._observation, _ = env.reset(options={"reset_mask": self._idle})
            self._idle = np.zeros_like(self._idle)
        observation = encode_observations(env.single_observation_space, self._observation)
        action = self._act(observation, wanted & ~self._idle, greedy)
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

        finished = np.flatnonzero(done & executed)
        if len(finished):
            recording.infos.append((len(finished), final_info(infos, finished, self.mode)))
            if self.sequences:
                recording.sequences.append(observation[finished])
        if not self.sequences:
            recording.observations.append(observation)
        recording.actions.append(action)
        recording.rewards.append(np.where(executed, reward, 0.0))
        recording.terminated.append(terminated & executed)
        recording.truncated.append(truncated & executed)
        recording.mask.append(executed)
        recording.ref_logp.append(step_info(infos, "ref_logp", done, self.mode))
        recording.task_ids.append(step_info(infos, "task_id", done, self.mode))
        recording.group_ids.append(self._groups)
        return done & executed

    def _act(self, observation: Tensor, active: np.ndarray, greedy: bool) -> Tensor:
        """Actions of all rows; those of rows that are not ``active`` [N] mean nothing."""
        with torch.inference_mode():
            extra: dict[str, Any] = {}
            if self.sequences:
                extra = {"state": self._decoding, "active": torch.from_numpy(active)}
            if greedy:
                return self.policy.mode(observation, **extra)
            return self.policy.sample(observation, self.generator, **extra)

    def _finish(self, recording: Recording, greedy: bool = False) -> Rollout:
        """Stack a recording, evaluate the policy on it once, and build the table of episodes."""
        mask = torch.from_numpy(np.stack(recording.mask))
        episodes, index = recording.episodes(self._returns, self._lengths)
        if not greedy:  # the recent episodes are those of the policy as it samples
            self.recent_returns.extend(episodes.returns.tolist())
            self.recent_lengths.extend(episodes.lengths.tolist())
        actions, episode_index = torch.stack(recording.actions), torch.from_numpy(index)
        if self.sequences:
            observations = torch.cat(recording.sequences)
        else:
            observations = torch.stack(recording.observations)

        with torch.no_grad():
            evaluation = self._evaluate(self.policy, observations, actions, episode_index)
            values = evaluation.value
            next_values = torch.cat([values[1:], self._bootstrap_values(mask.shape[1])])
            if recording.finals:
                steps, rows, finals = zip(*recording.finals, strict=True)
                encoded = encode_observations(self.env.single_observation_space, np.stack(finals))
                next_values[list(steps), list(rows)] = self.policy.value(encoded)
            if self.reference is None:
                ref_log_probs = recording.reference()
            else:
                ref_log_probs = self._evaluate(self.reference, observations, actions, episode_index).log_prob
        return Rollout(
            observations=observations,
            actions=actions,
            log_probs=evaluation.log_prob,
            ref_log_probs=ref_log_probs,
            values=values,
            next_values=next_values,
            rewards=torch.as_tensor(np.stack(recording.rewards), dtype=torch.float32),
            terminated=torch.from_numpy(np.stack(recording.terminated)),
            truncated=torch.from_numpy(np.stack(recording.truncated)),
            mask=mask,
            episode_index=episode_index,
            episodes=episodes,
            policy_version=self.policy_version,
            env_steps=recording.env_steps,
            sequences=self.sequences,
        )

    def _evaluate(
        self, policy: Policy, observations: Tensor, actions: Tensor, episode_index: Tensor
    ) -> Evaluation:
        """The policy on everything recorded: each field [T, N], 0 at steps that no episode has."""
        if not self.sequences:
            flat = policy.evaluate(observations.flatten(0, 1), actions.flatten(0, 1))
            return Evaluation(*(x.view(episode_index.shape) for x in flat))
        index, present = steps_of_episodes(episode_index, len(observations))
        by_length = torch.argsort(present.sum(1), stable=True)
        index, present = index[by_length], present[by_length]
        by_episode = torch.where(present, actions.flatten()[index], PADDING)
        parts = [
            policy.evaluate(o, a)
            for o, a in zip(
                observations[by_length].split(EVALUATED_AT_ONCE), by_episode.split(EVALUATED_AT_ONCE),
                strict=True,
            )
        ]
        time_major = []
        for field in zip(*parts, strict=True):
            scattered = torch.zeros(episode_index.numel(), dtype=field[0].dtype)
            scattered[index[present]] = torch.cat(field)[present]
            time_major.append(scattered.view(episode_index.shape))
        return Evaluation(*time_major)

    def _bootstrap_values(self, n_envs: int) -> Tensor:
        """V of the observation behind the last step, [1, N]; zeros where every row has ended there."""
        if self._observation is None:
            return torch.zeros(1, n_envs)
        space = self.env.single_observation_space
        return self.policy.value(encode_observations(space, self._observation)).unsqueeze(0)
