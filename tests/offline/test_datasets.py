"""The record of logged data. Names end with the id of the case that gave the numbers, where one did."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
from logged import EPISODES, assert_same, columns, record

from offline.datasets import (
    concatenate,
    episode_lengths,
    episode_returns,
    episode_slices,
    make_dataset,
    observation_statistics,
    scale_rewards_by_return_range,
    split,
    take,
)


def case(**changes):
    """Six rows: an episode of three that was cut, and one of three with a terminal (G02, G04)."""
    arrays = {
        "observations": np.array([0, 1, 2, 10, 11, 12], np.float32), "actions": np.zeros((6, 1), np.float32),
        "rewards": [1, 1, 1, 2, 2, 2], "terminals": [0, 0, 0, 0, 0, 1], "timeouts": [0, 0, 1, 0, 0, 0],
    }  # fmt: skip
    return arrays | changes


def triples(dataset, rows=slice(None)):
    """(observation, next observation, terminal) of each row."""
    return [
        [int(s), int(t), int(d)]
        for s, t, d in zip(
            dataset.observations[rows], dataset.next_observations[rows], dataset.terminals[rows], strict=True
        )
    ]


# --------------------------------------------------------------------------- successors and ends


def test_stored_next_observations_are_used_also_at_the_timeout_G02():
    dataset = make_dataset(**case(next_observations=np.array([1, 2, 3, 11, 12, 13], np.float32)))
    assert triples(dataset) == [[0, 1, 0], [1, 2, 0], [2, 3, 0], [10, 11, 0], [11, 12, 0], [12, 13, 1]]
    assert len(dataset) == 6 and dataset.trainable.all() and dataset.next_known.all()
    assert dataset.timeouts.tolist() == [False, False, True, False, False, False]


def test_without_stored_next_observations_no_successor_crosses_an_episode():
    dataset = make_dataset(**case())
    found = triples(dataset, dataset.trainable)
    assert found == [[0, 1, 0], [1, 2, 0], [10, 11, 0], [11, 12, 0], [12, 12, 1]]
    assert np.flatnonzero(~dataset.trainable).tolist() == [2]
    assert np.flatnonzero(~dataset.next_known).tolist() == [2, 5]
    assert len(dataset) == 6


def test_episode_returns_count_the_timeout_row_G04():
    assert episode_returns(make_dataset(**case())).tolist() == [3, 6]
    assert episode_returns(make_dataset(**case())).dtype == np.float64


def test_rewards_are_scaled_by_the_range_of_returns_G05():
    scaled = scale_rewards_by_return_range(make_dataset(**case()))
    np.testing.assert_allclose(scaled.rewards, [333.3333333] * 3 + [666.6666667] * 3, rtol=1e-6)
    assert scaled.rewards.dtype == np.float32
    with pytest.raises(ValueError, match="have the return 1"):
        scale_rewards_by_return_range(make_dataset([0, 1], [0, 0], [1, 1], [1, 1]))


def test_one_step_episodes_are_full_transitions_G09():
    dataset = make_dataset(np.arange(4), np.zeros((4, 1)), np.ones(4), [1, 1, 0, 1])
    assert episode_lengths(dataset).tolist() == [1, 1, 2]
    assert dataset.trainable.sum() == 4


def test_a_row_with_both_flags_is_terminal_and_ends_one_episode_G15():
    dataset = make_dataset(np.arange(2), np.zeros((2, 1)), np.ones(2), [0, 1], [0, 1])
    assert dataset.terminals.tolist() == [False, True]
    assert not dataset.timeouts.any()
    assert dataset.n_episodes == 1


def test_a_last_row_without_a_flag_is_a_timeout_and_stays():
    arrays = columns(((3, True), (2, False)))
    arrays["timeouts"][-1] = False
    dataset = make_dataset(**arrays)
    assert len(dataset) == 5 and dataset.timeouts.tolist() == [False] * 4 + [True]
    assert dataset.trainable.all(), "its next observation was stored"
    arrays["next_observations"] = None
    dataset = make_dataset(**arrays)
    assert len(dataset) == 5 and dataset.trainable.tolist() == [True] * 4 + [False]
    assert not arrays["timeouts"][-1], "the caller's array is not changed"


def test_some_next_observations_can_be_unknown_and_may_then_be_anything():
    arrays = columns(((2, False), (2, False)))
    arrays["next_observations"][1] = np.nan
    dataset = make_dataset(**arrays, next_known=[1, 0, 1, 1])
    assert dataset.trainable.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(dataset.next_observations[1], dataset.observations[1])
    assert np.isnan(arrays["next_observations"][1]).all(), "the caller's array is not changed"
    with pytest.raises(ValueError, match="next_known: row 2 has False"):
        make_dataset(**columns(((2, False), (2, False))), next_known=[1, 1, 0, 1])


# --------------------------------------------------------------------------- what is refused


def test_empty_data_is_refused_with_a_clear_text_G08():
    with pytest.raises(ValueError, match="observations: got no rows; allowed: at least one"):
        make_dataset(np.zeros((0, 3)), np.zeros((0, 1)), [], [])
    with pytest.raises(ValueError, match="observations: got no rows"):
        make_dataset([], [], [], [])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["observations", "actions", "rewards", "next_observations"])
def test_numbers_that_are_not_finite_are_refused_with_field_and_row_G10(field, value):
    arrays = columns()
    arrays[field] = np.array(arrays[field])
    arrays[field][7, ...] = value
    with pytest.raises(ValueError, match=rf"^{field}: row 7\b.*{value}"):
        make_dataset(**arrays)


def test_the_row_of_a_nan_is_found_in_any_chunk_G10():
    observations = np.zeros((150_000, 2), np.float32)
    observations[140_000, 1] = np.nan
    with pytest.raises(ValueError, match="observations: row 140000, column 1 has nan"):
        make_dataset(observations, np.zeros((150_000, 1)), np.zeros(150_000), np.zeros(150_000))


def test_the_nan_of_the_case_G10():
    with pytest.raises(ValueError, match="row 1, column 0 has nan"):
        make_dataset([[0, 1], [np.nan, 1]], np.zeros((2, 1)), [0, 0], [0, 1])


def test_a_reward_too_large_for_float32_is_refused():
    with pytest.raises(ValueError, match="rewards: row 1 has inf"):
        make_dataset([0, 1], [0, 0], [1.0, 1e300], [0, 1])


def test_actions_outside_their_bounds_are_refused_with_the_row_G12():
    given = {"observations": np.arange(3), "rewards": np.zeros(3), "terminals": [0, 0, 1]}
    with pytest.raises(ValueError, match=r"actions: row 0, column 0 has 1\.3.*clip_actions=True"):
        make_dataset(actions=[1.3, 1.0, -1.0], action_low=-1, action_high=1, **given)
    on_bounds = make_dataset(actions=[0.3, 1.0, -1.0], action_low=-1, action_high=1, **given)
    assert on_bounds.actions[:, 0].tolist() == [0.3, 1.0, -1.0]
    assert on_bounds.metadata == {"action_low": [-1.0], "action_high": [1.0]}


def test_actions_are_clipped_where_asked_and_that_is_said_G12():
    actions = np.array([1.3, 1.0, -1.0])
    with pytest.warns(UserWarning, match="actions of 1 rows lay outside"):
        dataset = make_dataset(
            np.arange(3), actions, np.zeros(3), [0, 0, 1], action_low=-1, action_high=1, clip_actions=True
        )
    assert dataset.actions[:, 0].tolist() == [1.0, 1.0, -1.0]
    assert actions[0] == 1.3, "the caller's array is not changed"


def test_bounds_are_compared_in_the_dtype_of_the_actions():
    # 0.4 as float32 is a little more than 0.4: a sampled action at the bound must pass.
    actions = np.full((2, 1), 0.4, np.float32)
    make_dataset([0, 1], actions, [0, 0], [0, 1], action_low=-0.4, action_high=0.4)
    over = np.nextafter(actions, np.float32(1))
    with pytest.raises(ValueError, match="actions: row 0"):
        make_dataset([0, 1], over, [0, 0], [0, 1], action_low=-0.4, action_high=0.4)


def test_bounds_per_component_also_come_from_the_metadata():
    metadata = {"action_low": [-1, -1, -0.01], "action_high": [1, 1, 1]}
    arrays = columns()
    row = int(np.flatnonzero(arrays["actions"][:, 2] < -0.01)[0])
    with pytest.raises(ValueError, match=f"actions: row {row}, column 2"):
        make_dataset(**arrays, metadata=metadata)
    with pytest.raises(ValueError, match="both or neither"):
        make_dataset(**arrays, action_low=-1)
    with pytest.raises(ValueError, match=r"arrays of shape \(3,\)"):
        make_dataset(**arrays, action_low=[-1, -1], action_high=[1, 1])
    with pytest.raises(ValueError, match="low at most high"):
        make_dataset(**arrays, action_low=1, action_high=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": np.zeros((5, 1))}, "actions: got 5 rows; allowed: 6, as many as observations"),
        ({"rewards": [1, 2]}, "rewards: got 2 rows; allowed: 6"),
        ({"terminals": np.zeros(7)}, "terminals: got 7 rows; allowed: 6"),
        ({"timeouts": np.zeros(1)}, "timeouts: got 1 rows; allowed: 6"),
        ({"next_observations": np.zeros(4, np.float32)}, "next_observations: got 4 rows; allowed: 6"),
        ({"infos": {"qpos": np.zeros((5, 2))}}, r"infos\['qpos'\]: got 5 rows; allowed: 6"),
        ({"rewards": np.zeros((6, 2))}, r"rewards: got shape \(6, 2\)"),
        ({"terminals": [0, 0, 0, 0.5, 0, 1]}, "terminals: row 3 has 0.5; allowed: 0 and 1"),
        ({"timeouts": [0, np.nan, 0, 0, 0, 0]}, "timeouts: row 1 has nan"),
        ({"actions": np.zeros((6, 2), int)}, "actions: got int64 of shape"),
        ({"actions": ["left"] * 6}, "actions: got <U4 of shape"),
        ({"observations": ["a"] * 6}, "observations: got dtype <U1; allowed: real numbers"),
        ({"observations": [[1], [2, 3], [4], [5], [6], [7]]}, "observations: .*allowed: rows of one shape"),
        ({"observations": 3.0}, "observations: got 3.0; allowed: an array with one row per transition"),
        ({"next_observations": np.zeros((6, 2), np.float32)}, "next_observations: got float32 of shape"),
    ],
)
def test_unusable_arrays_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        make_dataset(**case(**changes))


# --------------------------------------------------------------------------- dtypes


def test_float_actions_that_are_whole_numbers_stay_continuous():
    dataset = make_dataset(**case(actions=np.array([0.0, 1.0, 2.0, 0.0, 1.0, 2.0])))
    assert not dataset.discrete
    assert dataset.actions.dtype == np.float64 and dataset.actions.shape == (6, 1)


@pytest.mark.parametrize("actions", [np.arange(6, dtype=np.uint8), np.arange(6, dtype=np.int32)[:, None]])
def test_integer_actions_are_discrete(actions):
    dataset = make_dataset(**case(actions=actions))
    assert dataset.discrete
    assert dataset.actions.dtype == np.int64 and dataset.actions.tolist() == [0, 1, 2, 3, 4, 5]


def test_columns_and_flags_of_other_dtypes_are_read():
    dataset = make_dataset(
        **case(
            rewards=np.array([[1], [1], [1], [2], [2], [2]], np.float64),
            terminals=np.array([[0.0], [0], [0], [0], [0], [1]]),
            timeouts=np.array([0, 0, 1, 0, 0, 0], np.uint8),
        )
    )
    assert_same(dataset, make_dataset(**case()))


def test_large_arrays_of_the_right_dtype_are_not_copied():
    arrays = columns()
    dataset = make_dataset(**arrays)
    for name in ("observations", "actions", "rewards", "next_observations"):
        assert np.shares_memory(getattr(dataset, name), arrays[name]), name


def test_image_observations_keep_their_dtype():
    images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4, 1)
    dataset = make_dataset(images, [0, 1, 0], [0, 0, 1], [0, 0, 1])
    assert dataset.next_observations.dtype == np.uint8
    np.testing.assert_array_equal(dataset.next_observations[0], images[1])


# --------------------------------------------------------------------------- episodes


def test_episodes_end_at_terminals_and_timeouts():
    dataset = record()
    lengths = [length for length, _ in EPISODES]
    assert episode_lengths(dataset).tolist() == lengths
    assert dataset.episode_index.tolist() == np.repeat(np.arange(len(EPISODES)), lengths).tolist()
    assert dataset.n_episodes == len(EPISODES)
    returns = [sum(dataset.rewards[rows].tolist()) for rows in episode_slices(dataset)]
    np.testing.assert_allclose(episode_returns(dataset), returns)


def test_taken_rows_keep_their_successors_and_end_where_the_next_row_is_missing():
    dataset = record()
    part = take(dataset, [0, 1, 4, 5, 6, 8, 9])
    np.testing.assert_array_equal(part.next_observations, dataset.next_observations[[0, 1, 4, 5, 6, 8, 9]])
    # Row 1 is cut off from row 2; row 4 is terminal; row 6 from row 7; rows 8 and 9: cut, and cut off.
    assert part.terminals.tolist() == [False, False, True, False, False, False, False]
    assert part.timeouts.tolist() == [False, True, False, False, True, True, True]
    assert part.trainable.all()


def test_taken_rows_may_repeat_and_be_in_any_order():
    dataset = record()
    part = take(dataset, [7, 6, 6, 7])
    assert part.observations[:, 0].tolist() == [202, 201, 201, 202]
    assert part.episode_index.tolist() == [0, 1, 2, 2]


def test_a_mask_takes_whole_episodes_unchanged():
    dataset = record(infos={"number": np.arange(16)})
    part = take(dataset, dataset.episode_index == 2)
    assert part.infos["number"].tolist() == [5, 6, 7]
    assert part.timeouts.tolist() == [False, False, True]
    assert part.n_episodes == 1


def test_trainable_rows_alone_are_a_record_without_unknown_successors():
    dataset = record(stored=False)
    part = take(dataset, dataset.trainable)
    assert len(part) == len(dataset) - sum(not terminal for _, terminal in EPISODES)
    assert part.trainable.all()


@pytest.mark.parametrize("rows", [[], [16], [-1], [0.5], np.zeros(3, bool), [[0]]])
def test_rows_that_are_not_there_are_refused(rows):
    with pytest.raises(ValueError, match="rows: got"):
        take(record(), rows)


def test_a_split_keeps_episodes_whole_and_loses_none():
    dataset = record()
    first, second = split(dataset, 0.5, seed=1)
    assert first.n_episodes == second.n_episodes == 3
    whole = {tuple(dataset.observations[rows, 0].tolist()) for rows in episode_slices(dataset)}
    parts = [tuple(d.observations[rows, 0].tolist()) for d in (first, second) for rows in episode_slices(d)]
    assert len(parts) == 6 and set(parts) == whole
    assert_same(first, split(dataset, 0.5, seed=1)[0])
    others = [split(dataset, 0.5, seed=s)[0].observations for s in range(2, 6)]
    assert not all(np.array_equal(first.observations, other) for other in others)


def test_a_split_leaves_no_part_empty():
    assert [d.n_episodes for d in split(record(), 0.01, seed=0)] == [1, 5]
    assert [d.n_episodes for d in split(record(), 0.99, seed=0)] == [5, 1]
    with pytest.raises(ValueError, match="1 episode"):
        split(record(((3, True),)), 0.5, seed=0)
    with pytest.raises(ValueError, match="fraction=1"):
        split(record(), 1, seed=0)


def test_concatenated_records_number_their_episodes_through():
    first, second = record(infos={"a": np.arange(16)}), record(stored=False, infos={"a": np.arange(16)})
    both = concatenate([first, second])
    assert both.n_episodes == 2 * len(EPISODES)
    assert_same(take(both, np.arange(16)), first)
    assert_same(take(both, np.arange(16, 32)), second)


def test_concatenated_metadata_keeps_what_is_common_and_lists_the_rest():
    first = record(metadata={"env": "Hopper-v5", "seed": 0, "weights": np.ones(2)})
    second = record(metadata={"env": "Hopper-v5", "seed": 1, "weights": np.ones(2)})
    metadata = concatenate([first, second]).metadata
    assert metadata.keys() == {"env", "weights", "parts"}
    assert [part["seed"] for part in metadata["parts"]] == [0, 1]
    assert concatenate([first, first]).metadata is first.metadata


def test_records_that_do_not_fit_are_not_concatenated():
    discrete = make_dataset(**columns() | {"actions": np.zeros(16, int)})
    with pytest.raises(ValueError, match="actions of record 1 are int64"):
        concatenate([record(), discrete])
    with pytest.raises(ValueError, match="infos of record 1"):
        concatenate([record(), record(infos={"a": np.zeros(16)})])
    with pytest.raises(ValueError, match="at least one"):
        concatenate([])


# --------------------------------------------------------------------------- scales


def test_statistics_are_over_all_steps_of_ragged_episodes_G19():
    dataset = record(((3, True), (5, False)))
    mean, std = observation_statistics(dataset)
    steps = np.array([0, 1, 2, 100, 101, 102, 103, 104])
    np.testing.assert_allclose(mean, [steps.mean(), -steps.mean()], rtol=1e-12)
    np.testing.assert_allclose(std, [steps.std(), steps.std()], rtol=1e-12)


def test_statistics_lose_no_digits_over_many_chunks():
    rng = np.random.default_rng(0)
    observations = (1e4 + rng.standard_normal((200_000, 2))).astype(np.float32)
    dataset = make_dataset(observations, np.zeros(200_000, int), np.zeros(200_000), np.zeros(200_000))
    mean, std = observation_statistics(dataset)
    exact = observations.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(std, exact.std(axis=0), rtol=1e-9)


# --------------------------------------------------------------------------- summary


def test_a_summary_counts_what_is_there(tmp_path):
    pytest.importorskip("h5py")
    from offline.summary import plot_summary, summary

    actions = np.tile([[-1.0, 0.5, 1.0]], (16, 1))
    dataset = make_dataset(**columns() | {"actions": actions}, action_low=-1, action_high=1)
    found = summary(dataset)
    assert (found["rows"], found["episodes"], found["trainable"]) == (16, 6, 16)
    assert found["terminal_episodes"] == pytest.approx(3 / 6)
    assert found["lengths"]["min"] == 1 and found["lengths"]["max"] == 5
    assert found["returns"]["mean"] == pytest.approx(sum(dataset.rewards.tolist()) / 6)
    assert found["actions"]["low"] == found["actions"]["high"] == [-1.0, 0.5, 1.0]
    assert found["actions"]["at_bounds"] == pytest.approx(2 / 3)
    assert found["normalized_score"] is None
    json.dumps(found)
    plot_summary(dataset, tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_summary_of_discrete_actions_and_of_hopper():
    pytest.importorskip("h5py")
    from offline.summary import summary

    arrays = (np.arange(4), [0, 2, 2, 2], np.full(4, 3234.3), [1] * 4)
    found = summary(make_dataset(*arrays, metadata={"env": "Hopper-v5"}))
    assert found["actions"] == {"counts": {"0": 1, "2": 3}}
    assert found["normalized_score"] == pytest.approx(100, abs=1e-4)


def test_no_warning_comes_with_good_data():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = record(action_low=-1, action_high=1)
        repr(dataset)
        concatenate([dataset, dataclasses.replace(dataset)])
