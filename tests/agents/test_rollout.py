"""The rollout record against episodes that are written down, in every autoreset mode."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from recording import advantages, collector, table
from scripted import DISABLED, MODES, NEXT_STEP, SAME_STEP, Script, ScriptedEnv, vector

import llmgym  # noqa: F401  (registers the ids)
from agents.batch import make_batch
from agents.policies import make_policy

# --- where the value of a next observation comes from ---

# Observations 0, 1, then the final one 2; the next episode has 3, 4, 5. Values of B10 and B11.
VALUES = [0.5, 0.5, 0.9, 0.4, 0.4, 0.3]


def two_episodes(ends: str) -> list[Script]:
    return [Script([0, 1, 2], [1, 1], ends), Script([3, 4, 5, 5], [1, 1, 1])]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [("terminated", [1.5, 0.5, 0, 1.9, 0.9]), ("truncated", [2.4, 1.4, 0, 1.9, 0.9]),
     ("terminated truncated", [1.5, 0.5, 0, 1.9, 0.9])],
    ids=["B10", "B11", "both"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["sync", "native"])
def test_next_step_autoreset(kind, ends, expected):
    """The reset step counts for nothing; its observation is the final one of the episode before."""
    env = vector(kind, NEXT_STEP, [two_episodes(ends)], 6)
    rollout = collector(env, table(VALUES)).collect(5)
    assert rollout.mask[:, 0].tolist() == [True, True, False, True, True]
    assert rollout.rewards[:, 0].tolist() == [1, 1, 0, 1, 1]
    np.testing.assert_allclose(advantages(rollout)[:, 0], expected, atol=1e-6)
    assert len(make_batch(rollout, rollout.rewards, rollout.rewards)) == 4


@pytest.mark.parametrize(("kind", "mode"), [m for m in MODES if m.values[1] is SAME_STEP])
def test_same_step_autoreset_B12(kind, mode):
    """values[2] belongs to the new episode, the truncated step bootstraps from the final observation.

    With the reset observation the advantages would be [1.7, .7, 1.1].
    """
    scripts = [Script([0, 1, 2], [1, 1], "truncated"), Script([3, 4, 4], [1, 1])]
    env = vector(kind, mode, [scripts], 5)
    rollout = collector(env, table([0.5, 0.5, 0.9, 0.2, 0.3])).collect(3)
    assert rollout.observations[:, 0].tolist() == [0, 1, 3]
    assert rollout.mask.all()
    np.testing.assert_allclose(advantages(rollout)[:, 0], [2.4, 1.4, 1.1], atol=1e-6)


@pytest.mark.parametrize(
    ("ends", "advantage"), [("", 8.0), ("terminated", -1.0)], ids=["B13-not-done", "B13-terminated"]
)
@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_the_last_step_of_a_rollout(kind, mode, ends, advantage):
    env = vector(kind, mode, [[Script([0, 1, 1], [1, 1]) if not ends else Script([0, 1], [1], ends)]], 2)
    rollout = collector(env, table([2.0, 10.0])).collect(1)
    np.testing.assert_allclose(advantages(rollout, 0.9, 0.95), [[advantage]], atol=1e-6)


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_every_mode_gives_the_same_advantages(kind, mode, ends):
    """Only where the masked steps lie differs: the executed steps and their advantages do not."""
    env = vector(kind, mode, [two_episodes(ends)], 6)
    rollout = collector(env, table(VALUES)).collect(5 if mode is NEXT_STEP else 4)
    executed = rollout.mask[:, 0]
    assert rollout.observations[executed, 0].tolist() == [0, 1, 3, 4]
    expected = {"terminated": [1.5, 0.5, 1.9, 0.9], "truncated": [2.4, 1.4, 1.9, 0.9]}[ends]
    np.testing.assert_allclose(advantages(rollout)[executed, 0], expected, atol=1e-6)


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_rows_end_at_different_times(kind, mode):
    """Row 0 is truncated after one step, row 1 after three, again and again."""
    short, long = Script([0, 1], [1], "truncated"), Script([2, 3, 4, 5], [1, 2, 3], "terminated")
    env = vector(kind, mode, [[short], [long]], 6)
    policy = table([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    rollout = collector(env, policy).collect(7)
    for row, (script, following) in enumerate(((short, [10.0]), (long, [30.0, 40.0, None]))):
        executed = rollout.mask[:, row]
        n = len(script.rewards)
        seen, times = rollout.observations[executed, row].tolist(), range(int(executed.sum()))
        assert seen == [script.observations[t % n] for t in times]
        assert rollout.rewards[executed, row].tolist() == [script.rewards[t % n] for t in times]
        ends = (rollout.terminated | rollout.truncated)[executed, row].tolist()
        assert ends == [t % n == n - 1 for t in times]
        for t, value in zip(times, rollout.next_values[executed, row].tolist(), strict=True):
            if following[t % n] is not None:  # of a terminated step it is not read
                assert value == following[t % n]
    assert rollout.episodes.lengths.tolist().count(3) >= 1
    assert (rollout.rewards[~rollout.mask] == 0).all() and (rollout.episode_index[~rollout.mask] == -1).all()
    if mode is DISABLED and kind == "native":
        # Row 0 waits for row 1: executed in steps 0, 3, 6.
        assert rollout.mask[:, 0].tolist() == [True, False, False, True, False, False, True]
        assert rollout.mask[:, 1].all()


# --- the table of episodes ---


@pytest.mark.parametrize(("kind", "mode"), MODES)
@pytest.mark.parametrize("sizes", [[12], [1] * 12, [2] * 6, [5, 7], [3, 1, 8]], ids=str)
def test_episodes_do_not_depend_on_where_rollouts_are_cut(kind, mode, sizes):
    rows = [
        [Script([0, 1, 1, 1], [1, 10, 100], "terminated"), Script([2, 1, 1], [3, 30], "truncated")],
        [Script([3, 1], [7], "terminated"), Script([4, 1, 1, 1, 1], [0.5, 0.25, 2, 4], "terminated")],
    ]
    collected = collector(vector(kind, mode, rows, 5), table([0.0] * 5))
    rollouts = [collected.collect(n) for n in sizes]
    found: list[list[tuple[float, int, int]]] = []
    for rollout in rollouts:
        episodes = rollout.episodes
        found += zip(episodes.returns.tolist(), episodes.lengths.tolist(), episodes.task_ids.tolist(),
                     strict=True)  # fmt: skip

    whole = collector(vector(kind, mode, rows, 5), table([0.0] * 5)).collect(12)
    steps, ended = np.nonzero((whole.terminated | whole.truncated).numpy())
    expected, played = [], [0, 0]
    for row in ended:
        script = rows[row][played[row] % 2]
        expected.append((sum(script.rewards), len(script.rewards), played[row]))
        played[row] += 1
    assert (np.diff(steps) >= 0).all() and len(expected) >= 4
    assert found == expected
    assert list(collected.recent_returns) == [e[0] for e in expected]
    assert list(collected.recent_lengths) == [e[1] for e in expected]


def test_episode_index_points_from_each_step_to_its_episode():
    rows = [[Script([0, 1, 1], [1, 1], "terminated")], [Script([0, 1, 1, 1], [1, 1, 1], "truncated")]]
    rollout = collector(vector("native", SAME_STEP, rows, 2), table([0.0, 0.0])).collect(5)
    assert rollout.episode_index[:, 0].tolist() == [0, 0, 2, 2, -1]
    assert rollout.episode_index[:, 1].tolist() == [1, 1, 1, -1, -1]
    assert rollout.episodes.lengths.tolist() == [2, 3, 2]


def test_counting_with_autoreset_H08():
    """Two episodes of three steps in next-step mode take seven calls of step and are six steps."""
    row = ScriptedEnv([Script([0, 1, 1, 1], [1, 1, 1], "terminated")], 2)
    env = SyncVectorEnv([lambda: row])
    calls = 0
    step = env.step

    def counted(actions):
        nonlocal calls
        calls += 1
        return step(actions)

    env.step = counted
    rollout = collector(env, table([0.0, 0.0])).collect_episodes(2)
    assert calls == 7
    assert rollout.episodes.lengths.tolist() == [3, 3] and rollout.episodes.returns.tolist() == [3, 3]
    assert rollout.n_steps == 6 == row.steps


def test_sub_environments_get_consecutive_seeds_H01():
    rows = [ScriptedEnv([Script([0, 1], [1], "terminated")], 2) for _ in range(3)]
    collected = collector(SyncVectorEnv([lambda r=r: r for r in rows]), table([0.0, 0.0]), seed=7)
    collected.collect(6)
    assert [row.seeds[0] for row in rows] == [7, 8, 9]
    assert all(seed is None for row in rows for seed in row.seeds[1:])
    collected.reset()
    assert [row.seeds[-1] for row in rows] == [None] * 3


def test_equal_seeds_start_equal_episodes():
    def first_observations(seed):
        env = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)
        policy = make_policy("auto", env, torch.Generator().manual_seed(0))
        return collector(env, policy, seed).collect(1).observations[0]

    same = first_observations(7)
    assert torch.equal(same, first_observations(7)) and not torch.equal(same, first_observations(8))
    assert not torch.equal(same[0], same[1])


# --- whole episodes ---


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_collect_episodes_takes_the_first_whole_ones_of_every_row(kind, mode):
    """The long episode is in the record although the short row ends five times in the meantime."""
    short, long = [Script([0, 1], [1], "terminated")], [Script([2, 1, 1, 1, 1, 1], [1] * 5, "truncated")]
    collected = collector(vector(kind, mode, [short, long], 3), table([0.0] * 3))
    for _ in range(3):  # rows go on between the calls: each one starts anew
        rollout = collected.collect_episodes(2)
        assert sorted(rollout.episodes.lengths.tolist()) == [1, 1, 5, 5]
        assert rollout.mask.sum(0).tolist() == [2, 10] and rollout.n_steps == 12
        assert (rollout.episode_index[rollout.mask] >= 0).all()
        steps = [rollout.observations[rollout.mask[:, row], row].tolist() for row in (0, 1)]
        assert steps == [[0, 0], [2, 1, 1, 1, 1] * 2]
    assert len(collected.recent_returns) == 12


def test_collect_episodes_does_not_favour_short_ones():
    """Lengths 1 and 9, equally often: the mean length of the record is 5 and not near 1."""

    class CoinFlip(gym.Env):
        observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.left = 1 if self.np_random.random() < 0.5 else 9
            return 0, {}

        def step(self, action):
            self.left -= 1
            return 0, 0.0, self.left == 0, False, {}

    collected = collector(SyncVectorEnv([CoinFlip] * 50), table([0.0]))
    lengths = np.concatenate([collected.collect_episodes(1).episodes.lengths for _ in range(8)])
    assert len(lengths) == 400
    # standard error 4 / sqrt(400) = 0.2
    assert lengths.mean() == pytest.approx(5.0, abs=0.8)


def test_collect_starts_anew_after_collect_episodes():
    rows = [[Script([0, 1, 1], [1, 1], "terminated")], [Script([0, 1], [1], "terminated")]]
    collected = collector(vector("native", SAME_STEP, rows, 2), table([0.0, 0.0]))
    collected.collect_episodes(1)
    rollout = collected.collect(2)
    assert rollout.observations[0].tolist() == [0, 0]
    assert rollout.episodes.lengths.tolist() == [1, 2, 1]
