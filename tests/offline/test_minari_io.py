"""Minari's data sets: read as Minari writes them, and written as Minari reads them."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from logged import EPISODES, assert_same, columns, record

pytest.importorskip("h5py")
minari = pytest.importorskip("minari")

from minari.data_collector import EpisodeBuffer  # noqa: E402
from minari.dataset.minari_storage import MinariStorage  # noqa: E402

from offline import files  # noqa: E402
from offline.datasets import concatenate, episode_slices, make_dataset, take  # noqa: E402
from offline.minari_io import read_minari, write_minari  # noqa: E402

OBSERVATIONS = Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS = Box(-1, 1, (3,), np.float32)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Minari's folder of data sets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    (tmp_path / "datasets").mkdir()
    return tmp_path / "datasets"


def buffers(dataset, infos=None):
    """The episodes of a record with their T + 1 observations, put together by hand."""
    for rows in episode_slices(dataset):
        yield EpisodeBuffer(
            observations=np.vstack([dataset.observations[rows], dataset.next_observations[rows][-1:]]),
            actions=dataset.actions[rows], rewards=dataset.rewards[rows].astype(np.float64),
            terminations=dataset.terminals[rows], truncations=dataset.timeouts[rows],
            infos=infos(rows) if infos else None,
        )  # fmt: skip


def minari_writes(episodes, observation_space=OBSERVATIONS, action_space=ACTIONS, **further):
    """A data set made by Minari itself; its id."""
    with pytest.warns(UserWarning):  # author, description and so on are not given
        minari.create_dataset_from_buffers(
            "test/case-v0", list(episodes), observation_space=observation_space, action_space=action_space,
            **further,
        )  # fmt: skip
    return "minari:test/case-v0"


# --------------------------------------------------------------------------- what Minari writes


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_every_episode_that_minari_writes_is_aligned(root, data_format):
    if data_format != "hdf5":
        pytest.importorskip("pyarrow")
    dataset = read_minari(minari_writes(buffers(record()), data_format=data_format))
    assert_same(dataset, record())
    # In numbers: step t of episode e is observation 100 e + t, and 100 e + t + 1 follows.
    np.testing.assert_array_equal(dataset.next_observations[:, 0], dataset.observations[:, 0] + 1)
    assert dataset.metadata["action_low"] == [-1, -1, -1]
    assert dataset.metadata["minari"]["dataset_id"] == "test/case-v0"


def test_a_folder_is_read_like_an_id(root):
    dataset = read_minari(minari_writes(buffers(record())))
    assert_same(dataset, read_minari(root / "test/case-v0"))
    assert_same(dataset, read_minari(str(root / "test/case-v0/data")))


def test_a_last_step_without_a_flag_is_a_timeout(root):
    arrays = columns(((3, False), (2, False))) | {"timeouts": np.zeros(5, bool)}
    episodes = [
        EpisodeBuffer(
            observations=np.vstack([arrays["observations"][rows], arrays["next_observations"][rows][-1:]]),
            actions=arrays["actions"][rows], rewards=arrays["rewards"][rows],
            terminations=arrays["terminals"][rows], truncations=arrays["timeouts"][rows],
        )
        for rows in (slice(0, 3), slice(3, 5))
    ]  # fmt: skip
    assert_same(read_minari(minari_writes(episodes)), record(((3, False), (2, False))))


def test_infos_of_each_observation_are_kept_for_both_its_rows(root):
    def infos(rows):
        steps = rows.stop - rows.start
        return {
            "logp": np.arange(rows.start, rows.stop, dtype=np.float32),
            "state": {"qpos": np.arange(steps + 1) + 1000 * rows.start},
            "text": ["a"] * steps,
        }

    with pytest.warns(UserWarning, match="left out: text"):
        dataset = read_minari(minari_writes(buffers(record(), infos)))
    assert dataset.infos.keys() == {"logp", "state/qpos", "next/state/qpos"}
    np.testing.assert_array_equal(dataset.infos["logp"], np.arange(16, dtype=np.float32))
    np.testing.assert_array_equal(dataset.infos["next/state/qpos"], dataset.infos["state/qpos"] + 1)
    starts = [rows.start for rows in episode_slices(dataset)]
    np.testing.assert_array_equal(dataset.infos["state/qpos"][starts], 1000 * np.array(starts))


def test_infos_that_only_some_episodes_have_are_named_and_left_out(root):
    def infos(rows):
        steps = rows.stop - rows.start
        return {"always": np.ones(steps)} | ({} if rows.start else {"first": np.ones(steps)})

    with pytest.warns(UserWarning, match="left out: first$"):
        dataset = read_minari(minari_writes(buffers(record(), infos)))
    assert dataset.infos.keys() == {"always"}


def test_discrete_spaces_are_read_and_written(root):
    episodes = [
        EpisodeBuffer(
            observations=np.array([3, 1, 2]), actions=np.array([1, 2]), rewards=np.ones(2),
            terminations=np.array([False, True]), truncations=np.zeros(2, bool),
        )
    ]  # fmt: skip
    source = minari_writes(episodes, Discrete(4), Discrete(2, start=1))
    dataset = read_minari(source)
    assert dataset.discrete
    assert dataset.observations.tolist() == [3, 1] and dataset.next_observations.tolist() == [1, 2]
    assert (dataset.metadata["action_low"], dataset.metadata["action_high"]) == ([1], [2])
    write_minari(dataset, root / "again-v0")
    again = minari.load_dataset("again-v0")
    assert (again.observation_space, again.action_space) == (Discrete(4), Discrete(2, start=1))
    assert_same(dataset, read_minari("minari:again-v0"))


def test_spaces_that_a_record_cannot_hold_are_refused(root):
    episode = EpisodeBuffer(
        observations={"a": np.zeros((3, 2), np.float32)}, actions=np.zeros((2, 3), np.float32),
        rewards=np.ones(2), terminations=np.array([False, True]), truncations=np.zeros(2, bool),
    )  # fmt: skip
    source = minari_writes([episode], Dict(a=OBSERVATIONS))
    with pytest.raises(ValueError, match="has the space Dict.*allowed: Box and Discrete"):
        read_minari(source)


def test_an_episode_without_its_last_observation_is_refused_by_number(root):
    episodes = list(buffers(record()))
    broken = EpisodeBuffer(
        observations=episodes[2].observations[:-1], actions=episodes[2].actions, rewards=episodes[2].rewards,
        terminations=episodes[2].terminations, truncations=episodes[2].truncations,
    )  # fmt: skip
    source = minari_writes([*episodes[:2], broken])
    with pytest.raises(ValueError, match="episode 2 has 3 observations and 3 rewards"):
        read_minari(source)


def test_actions_outside_the_space_are_refused_or_clipped_G12(root):
    arrays = columns()
    arrays["actions"][3, 1] = 1.5
    source = minari_writes(buffers(make_dataset(**arrays)))
    with pytest.raises(ValueError, match="actions: row 3, column 1 has 1.5"):
        read_minari(source)
    with pytest.warns(UserWarning, match="actions of 1 rows"):
        dataset = read_minari(source, clip_actions=True)
    assert dataset.actions[3, 1] == 1.0


def test_what_is_not_there_is_said(root):
    with pytest.raises(FileNotFoundError, match="holds no Minari data set"):
        read_minari(root / "none")
    with pytest.raises(FileNotFoundError, match="none-v0 not found"):
        read_minari("minari:none-v0")


# --------------------------------------------------------------------------- what Minari reads


def test_minari_reads_every_episode_as_it_was(root):
    dataset = record(action_low=-1, action_high=1, infos={"behaviour_logp": np.arange(16.0)})
    write_minari(dataset, root / "mine-v0")
    read = minari.load_dataset("mine-v0")
    assert (read.total_episodes, read.total_steps) == (len(EPISODES), 16)
    assert (read.observation_space, read.action_space) == (OBSERVATIONS, ACTIONS)
    for number, (episode, (length, terminal)) in enumerate(zip(read, EPISODES, strict=True)):
        np.testing.assert_array_equal(episode.observations[:, 0], 100 * number + np.arange(length + 1))
        end = np.arange(length) == length - 1
        np.testing.assert_array_equal(episode.terminations, end & terminal)
        np.testing.assert_array_equal(episode.truncations, end & (not terminal))
        rows = episode_slices(dataset)[number]
        for theirs, ours in (
            (episode.actions, dataset.actions), (episode.rewards, dataset.rewards),
            (episode.infos["behaviour_logp"], dataset.infos["behaviour_logp"]),
        ):  # fmt: skip
            np.testing.assert_array_equal(theirs, ours[rows])


def test_minari_lists_what_was_written_by_id_and_can_sample_it(root):
    write_minari(record(), "minari:group/mine-v2")
    assert list(minari.list_local_datasets()) == ["group/mine-v2"]
    assert len(list(minari.load_dataset("group/mine-v2").sample_episodes(3))) == 3


def test_minari_recovers_the_environment(root):
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make("Pendulum-v1")
    observation, _ = env.reset(seed=0)
    following, reward, terminated, _, _ = env.step(np.zeros(1, np.float32))
    dataset = make_dataset(
        [observation], np.zeros((1, 1), np.float32), [reward], [terminated], None, [following],
        metadata={"env": "Pendulum-v1"}, action_low=-2, action_high=2,
    )  # fmt: skip
    write_minari(dataset, root / "pendulum-v0")
    recovered = minari.load_dataset("pendulum-v0").recover_environment()
    assert recovered.spec.id == "Pendulum-v1"
    assert read_minari(root / "pendulum-v0").metadata["env"] == "Pendulum-v1"


# --------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("folder", ["data", "mine-v0"])
def test_d4rl_to_minari_and_back_loses_nothing(tmp_path, folder):
    weights = np.ones((2, 2), np.float32)
    metadata = {"env": "Made-Up-v9", "seed": 3, "nested": {"list": [1, None]}, "weights": weights}
    infos = {"behaviour_logp": np.arange(16.0), "state/qpos": np.arange(32.0).reshape(16, 2)}
    dataset = record(metadata=metadata, infos=infos, action_low=-1, action_high=1)
    files.write(dataset, tmp_path / "a.hdf5")
    files.write(files.read(tmp_path / "a.hdf5"), tmp_path / folder)
    files.write(files.read(tmp_path / folder), tmp_path / "b.hdf5")
    for again in (files.read(tmp_path / folder), files.read(tmp_path / "b.hdf5")):
        assert_same(dataset, again)
        np.testing.assert_array_equal(again.metadata["weights"], weights)
        assert again.metadata["weights"].dtype == np.float32
        assert {k: v for k, v in again.metadata.items() if k not in ("minari", "weights")} == {
            "env": "Made-Up-v9", "seed": 3, "nested": {"list": [1, None]},
            "action_low": [-1.0] * 3, "action_high": [1.0] * 3,
        }  # fmt: skip


def test_images_come_back_without_loss(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    dataset = make_dataset(images[:4], [0, 1, 0, 1], np.ones(4), [0, 0, 0, 1], None, images[1:])
    write_minari(dataset, tmp_path / "images")
    assert_same(dataset, read_minari(tmp_path / "images"))


def test_a_terminal_without_its_successor_is_still_unknown_afterwards(tmp_path):
    dataset = record(((3, True), (1, True)), stored=False)
    write_minari(dataset, tmp_path / "data")
    assert_same(dataset, read_minari(tmp_path / "data"))
    assert read_minari(tmp_path / "data").next_known.tolist() == [True, True, False, False]


def test_a_timeout_without_its_successor_is_not_written_with_an_invented_one(tmp_path):
    dataset = concatenate([record(((2, True),)), record(((3, False), (1, False)), stored=False)])
    with pytest.raises(ValueError, match=r"row 4 is a timeout.*2 such rows.*take\(dataset, "):
        write_minari(dataset, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    write_minari(take(dataset, dataset.trainable), tmp_path / "data")
    assert_same(take(dataset, dataset.trainable), read_minari(tmp_path / "data"))


def test_rows_that_do_not_follow_each_other_are_not_written_as_an_episode(tmp_path):
    arrays = columns()
    arrays["next_observations"][6, 1] += 1
    with pytest.raises(ValueError, match="row 6 is not the observation of row 7 of the same episode"):
        write_minari(make_dataset(**arrays), tmp_path / "data")


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    write_minari(record(), tmp_path / "data")
    with pytest.raises(FileExistsError, match="is there already"):
        write_minari(record(), tmp_path / "data")
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_minari(record(metadata={"a": object()}), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_storage_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(MinariStorage, "update_metadata", fail)
    with pytest.raises(OSError, match="disk full"):
        write_minari(record(), tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_a_path_names_its_format(tmp_path):
    for name in ("a.hdf5", "b.H5"):
        files.write(record(), tmp_path / name)
        assert (tmp_path / name).is_file()
        assert_same(files.read(tmp_path / name), record())
    with pytest.raises(ValueError, match=r"a file .csv is in neither format; allowed: .hdf5 and .h5"):
        files.read(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="neither format"):
        files.write(record(), tmp_path / "a.npz")


def test_a_relative_path_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = record()
    write_minari(dataset, "logged")
    assert_same(dataset, read_minari("logged"))
    assert [path.name for path in tmp_path.iterdir()] == ["logged"]
