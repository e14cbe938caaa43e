"""Recording a shard: several streams of episodes, stepped side by side so that one predict serves all.

Plain environments are stepped, and not a vector environment: every episode starts by a reset of its own
seed, which the log keeps, so that it can be played again; and the observation behind the last step of an
episode is simply what ``step`` returned, whatever modes of autoreset there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary

from offline.acting import Acting, Source, make

STREAM_ROWS = 5_000
STREAMS = 4  # of a shard
REPORT_EVERY = 100  # steps of all streams between two reports of progress


@dataclass(frozen=True)
class Shard:
    """A piece of a collection that any process records with the same result.

    ==========  ===================================================================================
    source      the policy
    seed        of the whole collection
    part        number of the policy in the collection
    first       number of the first stream within the part
    quotas      rows that each stream gives at least
    last        the last stream ends with its quota, all others with an episode
    ==========  ===================================================================================
    """

    source: Source
    seed: int
    part: int
    first: int
    quotas: tuple[int, ...]
    last: bool

    @property
    def file(self) -> str:
        return f"{self.part}-{self.first:06d}.npz"


def shards(source: Source, seed: int, part: int, rows: int) -> list[Shard]:
    """The shards of one part; what they are does not depend on who records them."""
    starts = range(0, rows, STREAM_ROWS)
    quotas = [min(STREAM_ROWS, rows - start) for start in starts]
    if source.kind == "replay":  # a training run is one stream
        return [Shard(source, seed, part, 0, (rows,), last=True)]
    return [
        Shard(source, seed, part, first, tuple(quotas[first : first + STREAMS]),
              last=first + STREAMS >= len(quotas))
        for first in range(0, len(quotas), STREAMS)
    ]  # fmt: skip


def check_spaces(env: gym.Env) -> None:
    """Raise ValueError for observations or actions that the dataset record cannot hold."""
    if not isinstance(env.observation_space, Box | Discrete | MultiBinary):
        raise ValueError(
            f"observation_space={env.observation_space} cannot be logged; allowed: Box, Discrete, "
            "MultiBinary (flatten others with gymnasium.wrappers.FlattenObservation)"
        )
    box = env.action_space
    if not isinstance(box, Discrete) and not (
        isinstance(box, Box) and len(box.shape) == 1 and np.issubdtype(box.dtype, np.floating)
    ):
        raise ValueError(
            f"action_space={box} cannot be logged; allowed: Discrete, or a Box of shape [A] and a float dtype"
        )


class _Stream:
    """Episodes of one environment, one after the other, and the rows they gave."""

    def __init__(self, env: gym.Env, seeds: np.random.Generator, quota: int, whole: bool) -> None:
        self.env, self.quota, self.whole = env, quota, whole
        self._seeds = seeds
        space = env.observation_space
        # As D4RL logs them, and as every policy here reads them: what is logged is what it acted on.
        self._dtype = np.float32 if np.issubdtype(space.dtype, np.floating) else space.dtype
        # A limit for environments whose episodes do not end.
        spare = (env.spec.max_episode_steps if env.spec else None) or quota
        self._limit = quota + spare if whole else quota
        self.observations: list[np.ndarray] = []
        self.following: list[np.ndarray] = []
        self.actions: list[Any] = []
        self.rewards: list[float] = []
        self.terminals: list[bool] = []
        self.timeouts: list[bool] = []
        self.reset_seeds: list[int] = []
        self.ref_logp: list[float] = []
        self.state: Any = None  # of a policy that carries one
        self.done = False
        self._start()

    def _start(self) -> None:
        self._seed = int(self._seeds.integers(2**31))
        observation, _ = self.env.reset(seed=self._seed)
        # A copy: an environment may write its next observation into the same array.
        self.current = np.array(observation, self._dtype)
        self.starts, self.state = True, None

    def step(self, action: Any) -> None:
        """Take an action, and start the next episode unless the stream is complete."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        following = np.array(observation, self._dtype)
        self.observations.append(self.current)
        self.following.append(following)
        self.actions.append(action)
        self.rewards.append(float(reward))
        self.terminals.append(bool(terminated))
        self.timeouts.append(bool(truncated) and not terminated)
        self.reset_seeds.append(self._seed)
        self.ref_logp.append(info.get("ref_logp", np.nan))
        self.current, self.starts = following, False
        rows = len(self.rewards)
        if rows >= self._limit:
            self.done = True
            if self.whole and not terminated:
                self.timeouts[-1] = True
        elif terminated or truncated:
            self.done = rows >= self.quota
            if not self.done:
                self._start()

    def columns(self) -> dict[str, np.ndarray]:
        return {
            "observations": np.stack(self.observations),
            "actions": np.stack(self.actions),
            "rewards": np.array(self.rewards, np.float32),
            "next_observations": np.stack(self.following),
            "terminals": np.array(self.terminals),
            "timeouts": np.array(self.timeouts),
            "infos/reset_seed": np.array(self.reset_seeds, np.int64),
            "infos/ref_logp": np.array(self.ref_logp, np.float64),
        }


def record(
    shard: Shard, make_env: Callable[[], gym.Env], on_rows: Callable[[int], None]
) -> dict[str, np.ndarray]:
    """The rows of a shard, stream after stream.

    Streams end with an episode, so that none but a part's last one is cut: a stream of whole episodes until
    it has so many rows has no bias towards short ones (Wald's equation), as cut ones would have.

    Args:
        make_env: makes a plain environment.
        on_rows: called now and then with the number of rows that were added.

    Returns:
        the arrays that `offline.datasets.make_dataset` takes, its infos under "infos/NAME". The last row of
        the last stream may have neither flag.
    """
    beside = make_env()  # an agent may keep the environment it is given
    policy_seed = np.random.SeedSequence([shard.seed, shard.part, shard.first, 1]).generate_state(1)
    acting = make(shard.source, beside, int(policy_seed[0]))
    streams = [
        _Stream(
            make_env(),
            np.random.default_rng([shard.seed, shard.part, shard.first + i]),
            quota,
            whole=not shard.last or i + 1 < len(shard.quotas),
        )
        for i, quota in enumerate(shard.quotas)
    ]
    if not acting.stateless:
        first = streams[0].current[None]
        acting.stateless = acting.policy.predict(first, episode_start=np.array([True]))[1] is None
    space = beside.action_space
    reported, n_steps = 0, 0
    while active := [stream for stream in streams if not stream.done]:
        actions = _as_sent(space, _act(acting, active), len(active))
        for stream, action in zip(active, actions, strict=True):
            stream.step(action)
        n_steps += 1
        if n_steps % REPORT_EVERY == 0:
            total = sum(min(len(s.rewards), s.quota) for s in streams)
            on_rows(total - reported)
            reported = total
    on_rows(sum(shard.quotas) - reported)

    parts = [stream.columns() for stream in streams]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    log_prob = acting.log_prob(columns["observations"], columns["actions"])
    if log_prob is None:
        log_prob = np.full(len(columns["rewards"]), np.nan)
    columns["infos/behaviour_logp"] = log_prob
    for env in (beside, *(stream.env for stream in streams)):
        env.close()
    return columns


def _act(acting: Acting, active: list[_Stream]) -> Any:
    """Actions of the streams: of one predict, unless the policy carries a state of its own for each."""
    if acting.stateless:
        batch = np.stack([stream.current for stream in active])
        return acting.policy.predict(batch, episode_start=np.array([s.starts for s in active]))[0]
    actions = []
    for stream in active:
        action, stream.state = acting.policy.predict(
            stream.current[None], state=stream.state, episode_start=np.array([stream.starts])
        )
        actions.append(np.asarray(action)[0])
    return actions


def _as_sent(space: gym.Space, actions: Any, n: int) -> list[Any]:
    """The actions as the environment gets them and the log keeps them: inside the bounds, of its dtype."""
    array = np.asarray(actions)
    if isinstance(space, Discrete):
        if array.shape != (n,) or array.dtype.kind not in "iu":
            given = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"the policy gave actions {given}; allowed: integers [{n}]")
        return array.tolist()
    assert isinstance(space, Box)
    if array.shape != (n, *space.shape):
        raise ValueError(f"the policy gave actions of shape {array.shape}; allowed: {(n, *space.shape)}")
    return list(np.clip(array, space.low, space.high).astype(space.dtype))
