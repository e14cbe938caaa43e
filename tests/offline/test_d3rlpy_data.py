"""Every transition of every episode reaches d3rlpy as it was logged, through its buffer and our sampler."""

import numpy as np
import pytest
import torch

pytest.importorskip("d3rlpy")

import d3rlpy
from d3rlpy.constants import ActionSpace
from d3rlpy.dataset import MDPDataset
from d3rlpy.preprocessing import (
    MinMaxActionScaler,
    MultiplyRewardScaler,
    ReturnBasedRewardScaler,
    StandardObservationScaler,
)
from d3rlpy.torch_utility import TorchMiniBatch
from d3rlpy_batch import numpy_batch
from scipy import stats

from offline.algorithms import make
from offline.configs import fit_scalers
from offline.d3rlpy_data import Sampler, to_d3rlpy
from offline.datasets import make_dataset
from offline.spaces import Spaces

LENGTHS = [3, 1, 4, 1, 5]
TERMINATED = [False, True, True, False, False]  # one-step episodes of both kinds among them


def ends():
    last = np.cumsum(LENGTHS) - 1
    terminals, timeouts = np.zeros((2, sum(LENGTHS)), bool)
    terminals[last[TERMINATED]] = True
    timeouts[last[~np.array(TERMINATED)]] = True
    return terminals, timeouts


def record(stored=True, discrete=False, **kwargs):
    """Observations (row, episode); the one that follows the end of an episode is found nowhere else."""
    terminals, timeouts = ends()
    n = len(terminals)
    episode = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    observations = np.stack([np.arange(n), episode], axis=1).astype(np.float64)
    last = (terminals | timeouts)[:, None]
    following = np.where(last, observations + [0.5, 100], np.roll(observations, -1, 0))
    actions = np.arange(n) % 3 if discrete else np.linspace(-1, 1, 2 * n).reshape(n, 2)
    rewards = np.arange(n) ** 2
    return make_dataset(
        observations, actions, rewards, terminals, timeouts, following if stored else None, **kwargs
    )


def sampler(dataset, batch_size=8):
    """A sampler of the trainable rows, with nothing scaled."""
    config = d3rlpy.algos.BCConfig(batch_size=batch_size)
    return Sampler(dataset, Spaces.of(dataset), config, torch.Generator().manual_seed(0))


def rows_of(transitions):
    return np.array([t.observation[0] for t in transitions]).astype(int)


# --------------------------------------------------------------------------- d3rlpy's buffer


@pytest.mark.parametrize("discrete", [False, True])
def test_each_transition_of_each_episode_is_in_the_buffer_as_it_was_logged(discrete):
    data = record(discrete=discrete)
    buffer = to_d3rlpy(data)
    assert buffer.transition_count == len(data)
    transitions = [buffer.transition_picker(*buffer.buffer[i]) for i in range(len(data))]
    np.testing.assert_array_equal(rows_of(transitions), np.arange(len(data)))
    end = data.terminals | data.timeouts
    for row, t in enumerate(transitions):
        np.testing.assert_array_equal(t.observation, data.observations[row])
        np.testing.assert_array_equal(t.action, np.atleast_1d(data.actions[row]).astype(t.action.dtype))
        assert t.reward == data.rewards[row] and t.interval == 1
        assert t.terminal == data.terminals[row]
        if not data.terminals[row]:
            np.testing.assert_array_equal(t.next_observation, data.next_observations[row])
        if not end[row]:
            np.testing.assert_array_equal(t.next_action, transitions[row + 1].action)
        last = row + np.argmax(end[row:])
        np.testing.assert_array_equal(t.rewards_to_go[:, 0], data.rewards[row : last + 1])


def test_episodes_of_the_buffer_have_their_lengths_returns_and_ends():
    data = record()
    episodes = to_d3rlpy(data).episodes
    assert [e.size() for e in episodes] == LENGTHS
    assert [e.transition_count for e in episodes] == LENGTHS
    assert [e.terminated for e in episodes] == TERMINATED
    stops = np.cumsum(LENGTHS)
    returns = [float(np.sum(np.arange(b - n, b) ** 2)) for n, b in zip(LENGTHS, stops, strict=True)]
    assert [e.compute_return() for e in episodes] == returns


def test_d3rlpys_own_conversion_loses_what_ours_keeps():
    data = record()
    theirs = MDPDataset(data.observations, data.actions, data.rewards, data.terminals, data.timeouts)
    cut = int(data.timeouts.sum())
    assert theirs.transition_count == len(data) - cut == to_d3rlpy(data).transition_count - cut
    assert theirs.size() == len(LENGTHS) - 1  # the one-step episode that was cut is not there


def test_timeouts_without_a_stored_successor_are_not_invented():
    data = record(stored=False)
    buffer = to_d3rlpy(data)
    assert buffer.transition_count == len(data) - data.timeouts.sum() == data.trainable.sum()
    transitions = [buffer.transition_picker(*buffer.buffer[i]) for i in range(buffer.transition_count)]
    np.testing.assert_array_equal(rows_of(transitions), np.flatnonzero(~data.timeouts))
    drawn = torch.cat([sampler(data).draw() for _ in range(50)])
    assert not data.timeouts[drawn.numpy()].any()


def test_continuous_actions_that_are_whole_numbers_stay_continuous():
    data = make_dataset(np.zeros((3, 2)), np.float32([[0], [1], [-1]]), np.zeros(3), [0, 0, 1])
    info = to_d3rlpy(data).dataset_info
    assert (info.action_space, info.action_size) == (ActionSpace.CONTINUOUS, 1)


def test_sizes_of_discrete_spaces_come_from_the_metadata():
    data = make_dataset(
        np.array([2, 0, 1]), np.array([3, 1, 2]), np.zeros(3), [0, 0, 1],
        metadata={"n_actions": 6, "action_start": 1, "n_observations": 5},
    )  # fmt: skip
    buffer = to_d3rlpy(data)
    assert (buffer.dataset_info.action_space, buffer.dataset_info.action_size) == (ActionSpace.DISCRETE, 6)
    (episode,) = buffer.episodes
    np.testing.assert_array_equal(episode.observations, np.eye(5)[[2, 0, 1]])
    np.testing.assert_array_equal(episode.actions, [[2], [0], [1]])


def test_d3rlpys_evaluators_read_the_buffer():
    """Its temporal-difference error is that of all transitions, those at timeouts included."""
    data = record()
    algo = make("sac", data, 0, gamma=0.9).algo
    found = d3rlpy.metrics.TDErrorEvaluator()(algo, to_d3rlpy(data))
    observations, following = (x.astype(np.float32) for x in (data.observations, data.next_observations))
    q = algo.predict_value(observations, data.actions.astype(np.float32))
    later = algo.predict_value(following, algo.predict(following))
    target = data.rewards + 0.9 * np.where(data.terminals, 0, later)
    assert found == pytest.approx(np.mean((q - target) ** 2), rel=1e-4)


# --------------------------------------------------------------------------- the sampler


def test_stored_next_observations_are_used_and_the_timeout_bootstraps_G02():
    obs, following = [0, 1, 2, 10, 11, 12], [1, 2, 3, 11, 12, 13]
    data = make_dataset(
        np.float32(obs)[:, None], np.zeros((6, 1)), [1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1],
        [0, 0, 1, 0, 0, 0], np.float32(following)[:, None],
    )  # fmt: skip
    source = sampler(data)
    batch = source.batch(torch.arange(6))
    pairs = torch.cat([batch.observations, batch.next_observations, batch.terminals], dim=1)
    assert pairs.tolist() == [[0, 1, 0], [1, 2, 0], [2, 3, 0], [10, 11, 0], [11, 12, 0], [12, 13, 1]]
    drawn = torch.cat([source.draw() for _ in range(50)])
    assert sorted(set(drawn.tolist())) == list(range(6))


def test_one_step_episodes_are_full_transitions_G09():
    data = make_dataset(np.arange(4.0)[:, None], np.zeros((4, 1)), np.ones(4), [1, 1, 0, 1])
    buffer = to_d3rlpy(data)
    assert [e.size() for e in buffer.episodes] == [1, 1, 2]
    assert buffer.transition_count == 4
    assert sampler(data).batch(torch.arange(4)).terminals[:, 0].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("discrete", [False, True])
def test_a_batch_is_what_d3rlpy_makes_of_the_same_transitions(discrete):
    data = record(discrete=discrete)
    fields = {
        "observation_scaler": StandardObservationScaler(),
        "reward_scaler": MultiplyRewardScaler(0.1),
    }
    if not discrete:
        fields["action_scaler"] = MinMaxActionScaler(np.array([-2.0, -1.0]), np.array([1.0, 3.0]))
    spaces = Spaces.of(data)
    kind = d3rlpy.algos.DiscreteBCConfig if discrete else d3rlpy.algos.SACConfig
    config = fit_scalers(kind(batch_size=5, **fields), spaces, data)
    rows = np.array([13, 2, 3, 0, 7])
    theirs = TorchMiniBatch.from_batch(
        numpy_batch(data, spaces, rows), 0.99, False, "cpu",
        config.observation_scaler, config.action_scaler, config.reward_scaler,
    )  # fmt: skip
    ours = Sampler(data, spaces, config, torch.Generator()).batch(torch.from_numpy(rows))
    for name in vars(ours):
        a, b = getattr(ours, name), getattr(theirs, name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b), name


def test_the_sampler_and_the_buffer_agree_on_every_transition():
    data = record()
    buffer = to_d3rlpy(data)
    batch = sampler(data).batch(torch.arange(len(data)))
    for row in range(len(data)):
        t = buffer.transition_picker(*buffer.buffer[row])
        np.testing.assert_array_equal(batch.observations[row], t.observation)
        np.testing.assert_array_equal(batch.actions[row], t.action)
        np.testing.assert_array_equal(batch.next_actions[row], t.next_action)
        assert batch.rewards[row] == t.reward and batch.terminals[row] == t.terminal
        if not t.terminal:
            np.testing.assert_array_equal(batch.next_observations[row], t.next_observation)


def test_rows_are_drawn_uniformly_and_the_same_for_one_seed():
    data = record()
    first, second = sampler(data, batch_size=700), sampler(data, batch_size=700)
    drawn = first.draw()
    assert torch.equal(drawn, second.draw())
    assert not torch.equal(drawn, first.draw())
    counts = np.bincount(drawn, minlength=len(data))
    assert stats.chisquare(counts).pvalue > 0.01


def test_each_algorithm_draws_the_rows_that_it_can_learn_from():
    stored, lost = record(), record(stored=False)
    n = len(stored)

    def drawn(name, data):
        agent = make(name, data, 0, batch_size=400)
        return set(agent.sampler(data).draw().tolist())

    every, known = set(range(n)), set(np.flatnonzero(~lost.timeouts))
    assert drawn("bc", lost) == every  # imitation needs no successor
    assert drawn("sac", stored) == every and drawn("sac", lost) == known
    # ReBRAC's critic reads the action that followed, and behind a timeout there is none
    assert drawn("rebrac", stored) == known


def test_the_sampler_shares_the_records_arrays():
    data = record()
    assert np.shares_memory(sampler(data)._observations.numpy(), data.observations)


# --------------------------------------------------------------------------- scalers


def test_statistics_are_over_all_steps_of_ragged_episodes_G19():
    lengths = [3, 5]
    terminals = np.zeros(8)
    terminals[np.cumsum(lengths) - 1] = 1
    observations = np.random.default_rng(0).normal(size=(8, 2)) * [1, 10]
    data = make_dataset(observations, np.zeros((8, 1)), np.arange(8), terminals)
    fields = {"observation_scaler": StandardObservationScaler()}
    config = fit_scalers(d3rlpy.algos.SACConfig(**fields), Spaces.of(data), data)
    np.testing.assert_allclose(config.observation_scaler.mean, observations.mean(axis=0))
    np.testing.assert_allclose(config.observation_scaler.std, observations.std(axis=0))
    # and as d3rlpy fits it on our buffer
    scaler = StandardObservationScaler()
    buffer = to_d3rlpy(data)
    scaler.fit_with_transition_picker(buffer.episodes, buffer.transition_picker)
    np.testing.assert_allclose(config.observation_scaler.mean, scaler.mean, rtol=1e-6)
    np.testing.assert_allclose(config.observation_scaler.std, scaler.std, rtol=1e-6)


def test_rewards_are_scaled_by_the_range_of_returns_of_whole_episodes_G05():
    data = make_dataset(
        np.zeros((6, 1)), np.zeros((6, 1)), [1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0]
    )
    reward = ReturnBasedRewardScaler(multiplier=1000.0)
    config = fit_scalers(d3rlpy.algos.IQLConfig(reward_scaler=reward), Spaces.of(data), data)
    assert (config.reward_scaler.return_min, config.reward_scaler.return_max) == (3, 6)
    scaled = config.reward_scaler.transform(torch.ones(1)).item()
    assert scaled == pytest.approx(333.3333333, rel=1e-6)
    assert not reward.built  # the caller's is left as it was


def test_returns_without_a_range_cannot_scale_rewards():
    data = make_dataset(np.zeros((4, 1)), np.zeros((4, 1)), np.ones(4), [0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"episode returns do not vary \(all are 2"):
        make("iql", data, 0)


def test_bounds_other_than_one_become_an_action_scaler():
    data = make_dataset(
        np.zeros((2, 1)), np.float32([[-2, 0], [1, 5]]), np.zeros(2), [0, 1],
        action_low=[-2, 0], action_high=[2, 10],
    )  # fmt: skip
    batch = make("sac", data, 0).sampler(data).batch(torch.arange(2))
    np.testing.assert_allclose(batch.actions, [[-1, -1], [0.5, 0]])


def test_actions_outside_one_need_known_bounds():
    data = make_dataset(np.zeros((2, 1)), np.float32([[-2], [1]]), np.zeros(2), [0, 1])
    with pytest.raises(ValueError, match="actions reach from -2 to 1.*action_low"):
        make("bc", data, 0)


def test_arrays_that_may_not_be_written_to_are_read_without_a_warning(recwarn):
    data = record()
    for array in (data.observations, data.actions, data.next_observations, data.rewards):
        array.flags.writeable = False
    sampler(data).sample()
    to_d3rlpy(data)
    assert not [w for w in recwarn if "writable" in str(w.message)]
