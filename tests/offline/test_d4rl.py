"""D4RL's files, its own view of them, and its scores."""

import json
import tracemalloc

import numpy as np
import pytest
from logged import EPISODES, FIELDS, assert_same, columns, record

h5py = pytest.importorskip("h5py")

from offline.d4rl import (  # noqa: E402
    REFERENCE_RETURNS,
    gymnasium_id,
    normalized_score,
    qlearning_view,
    read_d4rl,
    write_d4rl,
)
from offline.datasets import concatenate, episode_returns, make_dataset  # noqa: E402


def d4rl_file(path, stored=True, **changes):
    """A file as D4RL's collection scripts write it: gzip, infos, and the weights of the policy."""
    arrays = columns(stored=stored)
    n = len(arrays["rewards"])
    rng = np.random.default_rng(1)
    arrays |= {
        "infos/action_log_probs": rng.standard_normal(n).astype(np.float32),
        "infos/qpos": rng.standard_normal((n, 6)).astype(np.float32),
        "infos/qvel": rng.standard_normal((n, 6)),
    } | changes  # fmt: skip
    weights = rng.standard_normal((4, 3)).astype(np.float32)
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if values is not None:
                file.create_dataset(name, data=values, compression="gzip")
        file["metadata/algorithm"] = np.bytes_("SAC")
        file["metadata/iteration"] = np.int32(3000)
        file["metadata/policy/nonlinearity"] = np.bytes_("relu")
        file["metadata/policy/fc0/weight"] = weights
    return arrays, weights


# --------------------------------------------------------------------------- reading


def test_a_file_as_d4rl_writes_it_is_read_unchanged(tmp_path):
    arrays, weights = d4rl_file(tmp_path / "a.hdf5")
    dataset = read_d4rl(tmp_path / "a.hdf5")
    for name in ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts"):
        assert getattr(dataset, name).dtype == arrays[name].dtype, name
        np.testing.assert_array_equal(getattr(dataset, name), arrays[name])
    assert dataset.infos.keys() == {"action_log_probs", "qpos", "qvel"}
    for name, values in dataset.infos.items():
        assert values.dtype == arrays[f"infos/{name}"].dtype
        np.testing.assert_array_equal(values, arrays[f"infos/{name}"])
    assert dataset.metadata["algorithm"] == "SAC" and dataset.metadata["iteration"] == 3000
    assert dataset.metadata["policy"]["nonlinearity"] == "relu"
    np.testing.assert_array_equal(dataset.metadata["policy"]["fc0"]["weight"], weights)
    assert dataset.trainable.all() and dataset.n_episodes == len(EPISODES)


def test_columns_float_rewards_and_numeric_flags_are_read(tmp_path):
    plain, _ = d4rl_file(tmp_path / "a.hdf5")
    d4rl_file(
        tmp_path / "b.hdf5",
        rewards=plain["rewards"].astype(np.float64)[:, None],
        terminals=plain["terminals"].astype(np.uint8)[:, None],
        timeouts=plain["timeouts"].astype(np.float32),
    )
    assert_same(read_d4rl(tmp_path / "a.hdf5"), read_d4rl(tmp_path / "b.hdf5"))


def test_without_next_observations_timeouts_count_but_teach_nothing(tmp_path):
    d4rl_file(tmp_path / "a.hdf5", stored=False)
    dataset = read_d4rl(tmp_path / "a.hdf5")
    assert_same(dataset, record(stored=False, infos=dataset.infos))
    np.testing.assert_array_equal(episode_returns(dataset), episode_returns(record()))
    np.testing.assert_array_equal(dataset.trainable, ~dataset.timeouts)


def test_a_file_without_timeouts_is_read_with_a_warning(tmp_path):
    d4rl_file(tmp_path / "a.hdf5", timeouts=None)
    with pytest.warns(UserWarning, match="has no timeouts"):
        dataset = read_d4rl(tmp_path / "a.hdf5")
    assert dataset.timeouts.sum() == 1 and dataset.timeouts[-1]


def test_further_arrays_are_kept_if_they_have_a_row_per_step_and_named_if_not(tmp_path):
    further = {"infos/state/goal": np.zeros((16, 2)), "task": np.arange(16), "odd": np.ones(3)}
    d4rl_file(tmp_path / "a.hdf5", **further)
    with pytest.warns(UserWarning, match=r"odd has shape \(3,\), not one entry per row \(16\); left out"):
        dataset = read_d4rl(tmp_path / "a.hdf5")
    assert dataset.infos["state/goal"].shape == (16, 2)
    assert dataset.infos["task"].tolist() == list(range(16))


def test_files_that_are_not_d4rl_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.hdf5"):
        read_d4rl(tmp_path / "none.hdf5")
    (tmp_path / "text.hdf5").write_text("observations")
    with pytest.raises(ValueError, match="text.hdf5 is no HDF5 file"):
        read_d4rl(tmp_path / "text.hdf5")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["observations"] = np.zeros(3)
        file["act"] = np.zeros(3)
    with pytest.raises(ValueError, match="it lacks actions, rewards, terminals; it has act, observations"):
        read_d4rl(tmp_path / "other.hdf5")
    rewards = columns()["rewards"]
    rewards[5] = np.nan
    d4rl_file(tmp_path / "nan.hdf5", rewards=rewards)
    with pytest.raises(ValueError, match="rewards: row 5 has nan"):
        read_d4rl(tmp_path / "nan.hdf5")


# --------------------------------------------------------------------------- writing


@pytest.mark.parametrize("stored", [True, False])
def test_a_record_comes_back_the_same(tmp_path, stored):
    infos = {"behaviour_logp": np.arange(16.0), "state/name": np.array([f"s{i}" for i in range(16)])}
    dataset = record(stored=stored, infos=infos, metadata={"env": "Hopper-v5"}, action_low=-1, action_high=1)
    write_d4rl(dataset, tmp_path / "a.hdf5")
    again = read_d4rl(tmp_path / "a.hdf5")
    assert_same(dataset, again)
    assert again.metadata == dataset.metadata
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert ("next_observations" in file) == stored
        assert file["terminals"].dtype == bool and file["rewards"].shape == (16,)


def test_one_episode_without_its_successor_does_not_cost_the_others_theirs(tmp_path):
    dataset = concatenate([record(), record(stored=False)])
    write_d4rl(dataset, tmp_path / "a.hdf5")
    assert_same(dataset, read_d4rl(tmp_path / "a.hdf5"))


def test_discrete_data_come_back_the_same(tmp_path):
    dataset = make_dataset(np.arange(5), [4, 0, 1, 2, 3], np.ones(5), [0, 1, 0, 0, 0])
    write_d4rl(dataset, tmp_path / "a.h5")
    assert_same(dataset, read_d4rl(tmp_path / "a.h5"))
    assert read_d4rl(tmp_path / "a.h5").discrete


def test_metadata_come_back_in_their_own_types(tmp_path):
    metadata = {
        "env": "Hopper-v5", "seed": 3, "ratio": 0.5, "done": True, "nothing": None, "empty": {}, "text": "ü",
        "versions": {"mujoco": "3.3", "more": {"x": [1, 2.5, "c"]}}, "bounds": [[-1.0, 1.0], [0.0, 2.0]],
    }  # fmt: skip
    dataset = record(metadata=metadata | {"weights": np.ones((2, 2), np.float32)})
    write_d4rl(dataset, tmp_path / "a.hdf5")
    again = read_d4rl(tmp_path / "a.hdf5").metadata
    weights = again.pop("weights")
    assert again == metadata and json.loads(json.dumps(again)) == metadata
    assert {k: type(v) for k, v in again.items()} == {k: type(v) for k, v in metadata.items()}
    assert weights.dtype == np.float32


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"policy": {"a": object()}}, TypeError, r"metadata\['policy'\]\['a'\].*allowed: what JSON can hold"),
        ({"a/b": 1}, ValueError, "'a/b'; allowed: one without a slash"),
        ({"": 1}, ValueError, "got the name ''"),
    ],
)
def test_a_write_that_fails_says_why_and_leaves_the_file_as_it_was(tmp_path, metadata, error, message):
    write_d4rl(record(), tmp_path / "a.hdf5")
    before = (tmp_path / "a.hdf5").read_bytes()
    with pytest.raises(error, match=message):
        write_d4rl(record(metadata=metadata), tmp_path / "a.hdf5")
    assert (tmp_path / "a.hdf5").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.hdf5"]


@pytest.mark.parametrize("stored", [True, False])
def test_reading_needs_little_more_memory_than_the_record(tmp_path, stored):
    n = 300_000
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((n, 17), np.float32)
    dataset = make_dataset(
        observations, rng.uniform(-1, 1, (n, 6)).astype(np.float32), np.zeros(n), np.zeros(n),
        np.arange(n) % 1000 == 999, observations if stored else None,
    )  # fmt: skip
    write_d4rl(dataset, tmp_path / "a.hdf5")
    del dataset, observations
    tracemalloc.start()
    dataset = read_d4rl(tmp_path / "a.hdf5")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * sum(getattr(dataset, name).nbytes for name in FIELDS)


# --------------------------------------------------------------------------- D4RL's own view


def one_by_one(arrays, terminate_on_end, max_episode_steps=None):
    """What ``qlearning_dataset`` documents and does, a row at a time."""
    rows = {"observations": [], "actions": [], "next_observations": [], "rewards": [], "terminals": []}
    step = 0
    for i in range(len(arrays["rewards"]) - 1):
        cut = step == max_episode_steps - 1 if arrays.get("timeouts") is None else bool(arrays["timeouts"][i])
        if cut and not terminate_on_end:
            step = 0
            continue
        if cut or arrays["terminals"][i]:
            step = 0
        rows["observations"].append(arrays["observations"][i])
        rows["actions"].append(arrays["actions"][i])
        rows["next_observations"].append(arrays["observations"][i + 1])
        rows["rewards"].append(arrays["rewards"][i])
        rows["terminals"].append(bool(arrays["terminals"][i]))
        step += 1
    return rows


def assert_equal_views(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == (bool if name == "terminals" else np.float32), name
        np.testing.assert_array_equal(found[name], np.array(values).reshape(found[name].shape), err_msg=name)
        assert len(found[name]) == len(values)


@pytest.mark.parametrize("terminate_on_end", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_view_is_that_of_qlearning_dataset(tmp_path, seed, terminate_on_end):
    rng = np.random.default_rng(seed)
    n = 60
    arrays = {
        "observations": rng.standard_normal((n, 2)), "actions": rng.uniform(-1, 1, (n, 1)),
        "rewards": rng.standard_normal(n).astype(np.float32), "terminals": rng.random(n) < 0.2,
        "timeouts": rng.random(n) < 0.2, "next_observations": rng.standard_normal((n, 2)),
    }  # fmt: skip
    arrays["terminals"][10] = arrays["timeouts"][10] = True
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, values in arrays.items():
            file[name] = values
    as_float32 = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in arrays.items()}
    found = qlearning_view(tmp_path / "a.hdf5", terminate_on_end=terminate_on_end)
    assert_equal_views(found, one_by_one(as_float32, terminate_on_end))

    one_flag = as_float32 | {"timeouts": arrays["timeouts"] & ~arrays["terminals"]}
    found = qlearning_view(make_dataset(**one_flag), terminate_on_end=terminate_on_end)
    assert_equal_views(found, one_by_one(one_flag, terminate_on_end))


@pytest.mark.parametrize("terminate_on_end", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_view_counts_steps_where_a_file_has_no_timeouts(tmp_path, limit, terminate_on_end):
    arrays = columns(stored=False) | {"terminals": np.random.default_rng(limit).random(16) < 0.3}
    del arrays["timeouts"], arrays["next_observations"]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, values in arrays.items():
            file[name] = values
    found = qlearning_view(tmp_path / "a.hdf5", terminate_on_end=terminate_on_end, max_episode_steps=limit)
    assert_equal_views(found, one_by_one(arrays, terminate_on_end, limit))


def test_the_view_drops_what_the_record_keeps():
    dataset = record(((3, False), (3, True)))
    view = qlearning_view(dataset)
    np.testing.assert_array_equal(view["observations"], dataset.observations[[0, 1, 3, 4]])
    assert len(dataset) == 6
    assert len(qlearning_view(record(((1, True),)))["rewards"]) == 0


# --------------------------------------------------------------------------- names and scores


@pytest.mark.parametrize(
    ("name", "random", "expert"),
    [
        ("halfcheetah", -280.178953, 12135.0), ("hopper", -20.272305, 3234.3), ("walker2d", 1.629008, 4592.3),
    ],
)  # fmt: skip
def test_scores_at_the_published_returns_are_0_and_100(name, random, expert):
    for form in (name, f"{name}-medium-v2", f"{name}-medium-replay", gymnasium_id(name)):
        np.testing.assert_allclose(normalized_score(form, [random, expert]), [0, 100], atol=1e-9)
    assert normalized_score(name, (random + expert) / 2) == pytest.approx(50)
    assert normalized_score(name, np.full((2, 3), expert)).shape == (2, 3)


def test_names_map_to_todays_environments():
    gymnasium = pytest.importorskip("gymnasium")
    ids = {name: gymnasium_id(f"{name}-medium-replay-v2") for name in REFERENCE_RETURNS}
    assert ids == {"halfcheetah": "HalfCheetah-v5", "hopper": "Hopper-v5", "walker2d": "Walker2d-v5"}
    for env_id in ids.values():
        assert gymnasium.spec(env_id).id == env_id
        assert gymnasium_id(env_id) == env_id


@pytest.mark.parametrize("name", ["hoper-medium-v2", "Hoppr-v5"])
def test_an_unknown_name_is_refused_with_the_nearest(name):
    for function in (gymnasium_id, lambda name: normalized_score(name, 0.0)):
        with pytest.raises(ValueError, match=f"name='{name}' has no reference.*did you mean 'hopper'"):
            function(name)
    with pytest.raises(ValueError, match="allowed: names beginning with halfcheetah, hopper, walker2d"):
        normalized_score("ant-medium-v2", 1.0)
