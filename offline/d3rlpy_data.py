"""From our record to d3rlpy: a buffer for its own tools, and batches for training.

d3rlpy keeps the observations of an episode and no next observations. At a timeout its picker therefore
has nothing that follows, and the transition is left out: its ``transition_count`` is one less than the
episode's length, and a one-step episode that was cut vanishes. Both ways here keep it, with the real next
observation. d3rlpy also takes continuous actions that happen to be whole numbers for discrete ones; here
the kind of the actions is always said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from d3rlpy.base import LearnableConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.dataset import Episode, InfiniteBuffer, ReplayBuffer, Transition
from d3rlpy.torch_utility import TorchMiniBatch
from torch import Tensor

from offline.datasets import Dataset, episode_slices
from offline.spaces import Spaces, as_tensor

# --------------------------------------------------------------------------- d3rlpy's own buffer


@dataclass(frozen=True)
class CutEpisode(Episode):
    """A d3rlpy episode that ends at a timeout whose next observation is known.

    Length and return are those of the logged episode, and every step of it is a transition. d3rlpy's own
    ``dump`` does not write the final observation: keep data in our formats.
    """

    final_observation: np.ndarray

    @property
    def transition_count(self) -> int:
        return self.size()


class TransitionPicker:
    """d3rlpy's picker, but with the last transition of a `CutEpisode` and stored successors of terminals.

    The action after the end of an episode is zeros, as d3rlpy has it at a terminal. Of the algorithms only
    ReBRAC reads it: train that one with `Sampler`, which leaves timeouts out for it.
    """

    def __call__(self, episode: Any, index: int) -> Transition:
        last = index == episode.size() - 1
        cut = last and not episode.terminated
        observation, action = episode.observations[index], episode.actions[index]
        if cut:
            following = episode.final_observation
        else:
            following = np.zeros_like(observation) if last else episode.observations[index + 1]
        return Transition(
            observation=observation,
            action=action,
            reward=episode.rewards[index],
            next_observation=following,
            next_action=np.zeros_like(action) if last else episode.actions[index + 1],
            terminal=float(last and episode.terminated),
            interval=1,
            rewards_to_go=episode.rewards[index:],
        )


def to_d3rlpy(dataset: Dataset, spaces: Spaces | None = None) -> ReplayBuffer:
    """A d3rlpy ReplayBuffer with every transition that a value may be learned from.

    Episodes have their logged lengths and returns. A timeout is a transition with its real next
    observation; only where the record does not know that (`Dataset.next_known`) there is none, as in
    d3rlpy's own conversion. The next observation of a terminal is zeros, as d3rlpy has it; no value reads it.

    Args:
        spaces: sizes of one-hot observations and discrete actions; taken from the data if not given.
    """
    spaces = spaces or Spaces.of(dataset)
    actions = spaces.encode_actions(dataset.actions)
    actions = actions.astype(np.int64) if spaces.discrete else actions
    episodes: list[Episode] = []
    for rows in episode_slices(dataset):
        last = rows.stop - 1
        parts: dict[str, Any] = {
            "observations": spaces.encode(dataset.observations[rows]),
            "actions": actions[rows],
            "rewards": dataset.rewards[rows, None],
            "terminated": bool(dataset.terminals[last]),
        }
        if parts["terminated"] or not dataset.next_known[last]:
            episodes.append(Episode(**parts))
        else:
            final = spaces.encode(dataset.next_observations[last : last + 1])[0]
            episodes.append(CutEpisode(**parts, final_observation=final))
    first = episodes[0]
    return ReplayBuffer(
        InfiniteBuffer(),
        episodes=episodes,
        transition_picker=TransitionPicker(),
        observation_signature=first.observation_signature,
        action_signature=first.action_signature,
        reward_signature=first.reward_signature,
        action_space=ActionSpace.DISCRETE if spaces.discrete else ActionSpace.CONTINUOUS,
        action_size=spaces.action_size,
    )


# --------------------------------------------------------------------------- batches


class Sampler:
    """Batches drawn with replacement, as d3rlpy's algorithms train on them; whole arrays instead of a loop.

    d3rlpy makes a Python object of each transition of a batch and stacks their parts. Here each array is
    read at the drawn rows in one go. The arrays are shared with the record, not copied.

    Args:
        dataset: the record.
        spaces: how its observations and actions are encoded.
        config: d3rlpy's configuration of the algorithm: batch size and (fitted) scalers.
        generator: draws the rows; it belongs to whoever resumes.
        device: where the batches lie; for a GPU the whole record is moved there.
        rows: numbers of the rows to draw from; None: those that are `Dataset.trainable`.

    Raises:
        ValueError: no rows to draw from.
    """

    def __init__(
        self,
        dataset: Dataset,
        spaces: Spaces,
        config: LearnableConfig,
        generator: torch.Generator,
        device: str = "cpu",
        rows: np.ndarray | None = None,
    ) -> None:
        rows = np.flatnonzero(dataset.trainable) if rows is None else rows
        if not len(rows):
            raise ValueError(f"none of the {len(dataset)} rows can be trained on: nothing is known to follow")
        self.config, self.spaces, self.generator, self.device = config, spaces, generator, device
        n = len(dataset)
        # No second array of a million numbers where every row counts.
        self._rows = None if len(rows) == n else self._tensor(np.asarray(rows, np.int64))
        self._n_rows = len(rows)
        self._n = n
        self._observations = self._tensor(dataset.observations)
        self._next_observations = self._tensor(dataset.next_observations)
        self._actions = self._tensor(dataset.actions)
        self._rewards = self._tensor(dataset.rewards)
        self._terminals = self._tensor(dataset.terminals)
        self._ends = self._tensor(dataset.terminals | dataset.timeouts)
        self._ones = torch.ones(config.batch_size, 1, device=device)
        self._zeros = torch.zeros(config.batch_size, 1, device=device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return as_tensor(array).to(self.device)

    def draw(self) -> Tensor:
        """Row numbers of a batch, int64 [B], uniform and independent."""
        index = torch.randint(self._n_rows, (self.config.batch_size,), generator=self.generator)
        index = index.to(self.device)
        return index if self._rows is None else self._rows[index]

    def sample(self) -> TorchMiniBatch:
        """The batch of freshly drawn rows."""
        return self.batch(self.draw())

    def batch(self, rows: Tensor) -> TorchMiniBatch:
        """The batch of the given rows, int64 [B], scaled as the configuration says.

        The action that follows is zeros after the end of an episode.
        """
        config, spaces = self.config, self.spaces
        observations = spaces.encode_tensor(self._observations[rows])
        next_observations = spaces.encode_tensor(self._next_observations[rows])
        actions = spaces.encode_action_tensor(self._actions[rows])
        following = spaces.encode_action_tensor(self._actions[(rows + 1).clamp_(max=self._n - 1)])
        following = following.masked_fill(self._ends[rows, None], 0.0)
        rewards = self._rewards[rows, None]
        if config.observation_scaler:
            observations = config.observation_scaler.transform(observations)
            next_observations = config.observation_scaler.transform(next_observations)
        if config.action_scaler:
            actions = config.action_scaler.transform(actions)
            following = config.action_scaler.transform(following)
        if config.reward_scaler:
            rewards = config.reward_scaler.transform(rewards)
        full = len(rows) == config.batch_size
        return TorchMiniBatch(
            observations=observations,
            actions=actions,
            rewards=rewards,
            next_observations=next_observations,
            next_actions=following,
            returns_to_go=self._zeros if full else torch.zeros_like(rewards),
            terminals=self._terminals[rows, None].float(),
            intervals=self._ones if full else torch.ones_like(rewards),
            device=self.device,
        )
