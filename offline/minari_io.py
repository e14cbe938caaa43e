"""Minari's data sets: each episode of T steps holds T + 1 observations.

Reading and writing go through Minari's own storage classes, so that any of its formats can be read and
what is written here opens with ``minari.MinariDataset`` or ``minari.load_dataset``. Its collector, which
needs jax, is not used.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from minari import MinariDataset, __version__, load_dataset
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_dataset import DATASET_ID_RE
from minari.dataset.minari_storage import METADATA_FILE_NAME, MinariStorage
from minari.serialization import deserialize_space
from minari.storage.datasets_root_dir import get_dataset_path

from offline.checks import chunks
from offline.datasets import Dataset, episode_slices, make_dataset
from offline.files import MINARI_PREFIX

OWN = "llmgym"  # the key of a record's own metadata among Minari's

# --------------------------------------------------------------------------- reading


def read_minari(path_or_id: str | Path, *, clip_actions: bool = False) -> Dataset:
    """Read a Minari data set of any storage format; nothing is downloaded.

    The next observation of every step is the one that Minari stored behind it, in every episode and also
    at its end. A last step without a flag becomes a timeout. An info of T + 1 entries has one for each
    observation: those of the observations that were acted on are kept under its name, those of the
    observations that followed under "next/" and its name. Minari's own metadata is kept under "minari",
    and the environment's id under "env".

    Args:
        path_or_id: a folder, or "minari:" and the id of a data set in Minari's folder (see Minari's
            variable MINARI_DATASETS_PATH): "minari:mujoco/hopper/medium-v0".
        clip_actions: as in `make_dataset`.

    Warns:
        UserWarning: infos are left out, as they are not arrays of one shape in all episodes.

    Raises:
        FileNotFoundError: there is no such data set.
        ValueError: spaces other than Box and Discrete; an episode without its last observation; what
            `make_dataset` refuses.
    """
    source = _open(path_or_id)
    for space in (source.observation_space, source.action_space):
        if not isinstance(space, Box | Discrete):
            raise ValueError(f"{path_or_id} has the space {space}; allowed: Box and Discrete")
    raw = MinariStorage.read_raw_metadata(source.storage.data_path)
    own = raw.pop(OWN, {})
    metadata = _restored(own.get("metadata", {})) | {"minari": raw}
    if source.env_spec is not None:
        metadata.setdefault("env", source.env_spec.id)
    columns = _read_episodes(source, path_or_id)
    columns["next_known"][own.get("unknown_next", [])] = False
    low, high = _bounds(source.action_space)
    return make_dataset(
        **columns, metadata=metadata, action_low=low, action_high=high, clip_actions=clip_actions
    )


def _open(path_or_id: str | Path) -> MinariDataset:
    if isinstance(path_or_id, str) and path_or_id.startswith(MINARI_PREFIX):
        return load_dataset(path_or_id.removeprefix(MINARI_PREFIX))
    folder = data_folder(path_or_id)
    if folder is None:
        raise FileNotFoundError(
            f"{path_or_id} holds no Minari data set: there is no {METADATA_FILE_NAME} in it or in its "
            f"folder data (one in Minari's own folder is named '{MINARI_PREFIX}ID')"
        )
    return MinariDataset(folder)


def data_folder(path: str | Path) -> Path | None:
    """Where the data are: the folder itself or its folder "data"; None if it is no Minari data set."""
    return next((f for f in (Path(path) / "data", Path(path)) if (f / METADATA_FILE_NAME).is_file()), None)


def _bounds(space: Space) -> tuple[Any, Any]:
    """Lowest and highest action; (None, None) where there is a component without bounds."""
    if isinstance(space, Discrete):
        return int(space.start), int(space.start + space.n - 1)
    assert isinstance(space, Box)
    return (space.low, space.high) if space.is_bounded() else (None, None)


def _read_episodes(source: MinariDataset, name: str | Path) -> dict[str, Any]:
    """The rows of all episodes, with one episode in memory beside them."""
    n = int(source.total_steps)
    columns: dict[str, np.ndarray] = {}
    infos: dict[str, np.ndarray] = {}
    left_out: set[str] = set()
    start = 0
    for number, episode in enumerate(source.iterate_episodes()):
        steps, observations = len(episode.rewards), np.asarray(episode.observations)
        if len(observations) != steps + 1 or start + steps > n:
            raise ValueError(
                f"{name}: episode {number} has {len(observations)} observations and {steps} rewards, behind "
                f"{start} of {n} steps; allowed: one observation more than rewards, and {n} steps in all"
            )
        rows = slice(start, start + steps)
        ends = np.asarray(episode.truncations).astype(bool)
        ends[-1:] = True
        parts = {
            "observations": observations[:-1], "actions": np.asarray(episode.actions),
            "rewards": np.asarray(episode.rewards), "next_observations": observations[1:],
            "terminals": np.asarray(episode.terminations), "timeouts": ends,
        }  # fmt: skip
        _fill(columns, parts, rows, n)
        found = _infos(episode.infos or {}, steps)
        left_out |= {key for key, part in found.items() if part is None}
        if number:
            left_out |= infos.keys() ^ found.keys()
            left_out |= {k for k in infos.keys() - left_out if infos[k].shape[1:] != found[k].shape[1:]}
        _fill(infos, {key: part for key, part in found.items() if key not in left_out}, rows, n)
        start += steps
    if start != n:
        raise ValueError(f"{name}: it counts {n} steps, and its episodes have {start}")
    if left_out:
        warnings.warn(
            f"{name}: infos that are not arrays of numbers, of one shape in all episodes, are left out: "
            f"{', '.join(sorted(left_out))}",
            stacklevel=3,
        )
    infos = {key: array for key, array in infos.items() if key not in left_out}
    return columns | {"infos": infos, "next_known": np.ones(n, bool)}


def _fill(columns: dict[str, np.ndarray], parts: dict[str, Any], rows: slice, n: int) -> None:
    for name, part in parts.items():
        if name not in columns:
            columns[name] = np.empty((n, *part.shape[1:]), part.dtype)
        columns[name][rows] = part


def _infos(values: dict[str, Any], steps: int, prefix: str = "") -> dict[str, Any]:
    """The nested infos of an episode by path, one entry per step; None for what is not that."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = prefix + name
        if isinstance(value, dict):
            found |= _infos(value, steps, f"{path}/")
            continue
        array = np.asarray(value)
        if array.dtype.kind not in "fiub" or array.shape[:1] not in ((steps,), (steps + 1,)):
            found[path] = None
        elif len(array) == steps:
            found[path] = array
        else:
            found |= {path: array[:-1], f"next/{path}": array[1:]}
    return found


# --------------------------------------------------------------------------- writing


def write_minari(dataset: Dataset, path_or_id: str | Path) -> None:
    """Write a record as a new Minari data set in HDF5, losslessly, one episode at a time.

    The record's metadata and what it does not know go into Minari's metadata under "llmgym", so that
    `read_minari` gives the same record. The spaces are those that the data came with, or Boxes without
    bounds around observations and the known bounds around actions. Where ``metadata["env"]`` is an
    environment that Gymnasium has, Minari can recover it.

    Args:
        path_or_id: a folder to be made, or "minari:" and an id (see `read_minari`). A folder whose name
            is an id, such as "medium-v0", can be loaded by that name with MINARI_DATASETS_PATH as its
            parent.

    Raises:
        FileExistsError: the folder is there already.
        ValueError: a timeout row whose next observation is not known, as Minari has a place for it and
            no way to say so; a row within an episode whose next observation is not the following row's.
        TypeError: metadata that neither JSON nor an array can hold.
    """
    _check_chain(dataset)
    folder = Path(path_or_id)
    if isinstance(path_or_id, str) and path_or_id.startswith(MINARI_PREFIX):
        folder = get_dataset_path(path_or_id.removeprefix(MINARI_PREFIX))
        name = path_or_id.removeprefix(MINARI_PREFIX)
    else:
        name = folder.name if DATASET_ID_RE.fullmatch(folder.name) else "data-v0"
    folder = folder.absolute()  # Minari joins a relative one to itself
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; write elsewhere, or remove it first")
    own = {"metadata": _plain(dataset.metadata), "unknown_next": np.flatnonzero(~dataset.next_known).tolist()}
    json.dumps(own)  # raises before anything is written
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        storage = MinariStorage.new(
            temporary / "data", *_spaces(dataset), env_spec=_env_spec(dataset.metadata), jpeg_encoding=False
        )
        storage.update_metadata({"dataset_id": name, "minari_version": __version__, OWN: own})
        storage.update_episodes(_episodes(dataset))
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_chain(dataset: Dataset) -> None:
    unknown = np.flatnonzero(~dataset.trainable)
    if len(unknown):
        raise ValueError(
            f"next_observations: row {unknown[0]} is a timeout, and what followed is not known "
            f"({len(unknown)} such rows); Minari stores it for every episode. Leave these rows out, and with "
            "them their rewards: take(dataset, dataset.trainable)"
        )
    ends = dataset.terminals | dataset.timeouts
    for part in chunks(len(dataset) - 1):
        following = dataset.observations[part.start + 1 : part.stop + 1]
        differs = (dataset.next_observations[part] != following).reshape(len(following), -1).any(axis=1)
        wrong = np.flatnonzero(differs & ~ends[part])
        if len(wrong):
            row = part.start + wrong[0]
            raise ValueError(
                f"next_observations: row {row} is not the observation of row {row + 1} of the same episode; "
                "Minari stores one observation for both"
            )


def _episodes(dataset: Dataset) -> Iterator[EpisodeBuffer]:
    for rows in episode_slices(dataset):
        infos: dict[str, Any] = {}
        for path, values in dataset.infos.items():
            *groups, name = path.split("/")
            place = infos
            for group in groups:
                place = place.setdefault(group, {})
            place[name] = values[rows]
        last = dataset.next_observations[rows.stop - 1 : rows.stop]
        yield EpisodeBuffer(
            observations=np.concatenate([dataset.observations[rows], last]),
            actions=dataset.actions[rows], rewards=dataset.rewards[rows],
            terminations=dataset.terminals[rows], truncations=dataset.timeouts[rows], infos=infos,
        )  # fmt: skip


def _spaces(dataset: Dataset) -> tuple[Space, Space]:
    stored = dataset.metadata.get("minari", {})
    if {"observation_space", "action_space"} <= stored.keys():
        spaces = tuple(deserialize_space(stored[name]) for name in ("observation_space", "action_space"))
        arrays = (dataset.observations, dataset.actions)
        if all(s.shape == a.shape[1:] and s.dtype == a.dtype for s, a in zip(spaces, arrays, strict=True)):
            return spaces[0], spaces[1]
    low, high = (dataset.metadata.get(name) for name in ("action_low", "action_high"))
    if dataset.discrete:
        first = int(dataset.actions.min()) if low is None else int(low[0])
        last = int(dataset.actions.max()) if high is None else int(high[0])
        return _box(dataset.observations), Discrete(last - first + 1, start=first)
    return _box(dataset.observations), _box(dataset.actions, low, high)


def _box(array: np.ndarray, low: Any = None, high: Any = None) -> Box:
    """The Box of the rows of an array, between the bounds or those of its dtype."""
    kind: Any = array.dtype
    least: Any
    most: Any
    if kind.kind == "f":
        least, most = -np.inf, np.inf
    else:
        least, most = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    shape = array.shape[1:]
    least, most = (
        np.broadcast_to(np.asarray(limit if bound is None else bound, kind), shape)
        for limit, bound in ((least, low), (most, high))
    )
    return Box(least, most, shape, kind)


def _env_spec(metadata: dict[str, Any]) -> Any:
    try:
        return gym.spec(metadata["env"])
    except (KeyError, gym.error.Error, TypeError, ImportError):
        return None  # data need not come from an environment that is installed


def _plain(value: Any) -> Any:
    """Metadata as JSON can hold it; arrays become {"array": their values, "dtype": ...}."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array", "dtype"}:
        return np.array(value["array"], value["dtype"])
    return {key: _restored(item) for key, item in value.items()}
