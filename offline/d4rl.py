"""D4RL's files: reading and writing its HDF5 layout, its own view of them, and its normalised scores.

The layout (Fu et al. 2020, https://arxiv.org/abs/2004.07219) is one flat array per field:
``observations``, ``actions``, ``rewards``, ``terminals``, ``timeouts``, and in newer files
``next_observations``; beside them ``infos/...``, one entry per row, and ``metadata/...``, such as the
weights of the policy that acted. The package ``d4rl`` is never imported.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from agents.files import replace_file
from llmgym.checks import did_you_mean
from offline.checks import as_column, as_flags
from offline.datasets import Dataset, make_dataset

REQUIRED = ("observations", "actions", "rewards", "terminals")
OPTIONAL = ("timeouts", "next_observations")
NEXT_KNOWN = "infos/next_known"

# Mean returns of a random policy and of the expert (SAC), as D4RL publishes them: score 0 and score 100.
REFERENCE_RETURNS = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
}
GYMNASIUM_IDS = {"halfcheetah": "HalfCheetah-v5", "hopper": "Hopper-v5", "walker2d": "Walker2d-v5"}

# --------------------------------------------------------------------------- reading


def read_d4rl(path: str | Path) -> Dataset:
    """Read a file of D4RL, or one that `write_d4rl` wrote.

    Every array is read straight into its place: the peak is the record itself and some flags. Stored next
    observations are used, and timeouts kept (see `make_dataset` for files that have none). Arrays of
    ``infos/`` go to ``infos`` under their name behind the slash, and so do further arrays of one entry per
    row; ``metadata/`` becomes a nested dictionary.

    Warns:
        UserWarning: there are no timeouts, so that resets which are no terminals cannot be seen; an
            array has another number of rows and is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no HDF5 file, or lacks one of D4RL's arrays; what `make_dataset` refuses.
    """
    with _open(path) as file:
        arrays: dict[str, Any] = {n: _read(file[n]) for n in (*REQUIRED, *OPTIONAL) if n in file}
        infos, known = {}, None
        n = len(arrays["observations"])
        for name in _names(file):
            if name in arrays or name.startswith("metadata/"):
                continue
            if file[name].shape[:1] != (n,):
                warnings.warn(
                    f"{path}: {name} has shape {file[name].shape}, not one entry per row ({n}); left out",
                    stacklevel=2,
                )
            elif name == NEXT_KNOWN:
                known = file[name][()]
            else:
                infos[name.removeprefix("infos/")] = _read(file[name])
        metadata = _read_metadata(file["metadata"]) if "metadata" in file else {}
    if "timeouts" not in arrays:
        warnings.warn(
            f"{path} has no timeouts: where an episode was cut without a terminal, the next row looks like "
            "its continuation",
            stacklevel=2,
        )
    return make_dataset(**arrays, metadata=metadata, infos=infos, next_known=known)


def _open(path: str | Path) -> h5py.File:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is no HDF5 file: {error}") from error
    missing = [name for name in REQUIRED if not isinstance(file.get(name), h5py.Dataset)]
    if missing:
        names = ", ".join(_names(file)[:10]) or "nothing"
        file.close()
        raise ValueError(f"{path} has no D4RL layout: it lacks {', '.join(missing)}; it has {names}")
    return file


def _names(file: h5py.File) -> list[str]:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def _read(stored: h5py.Dataset) -> np.ndarray:
    if h5py.check_string_dtype(stored.dtype) is not None:
        return stored.asstr()[()].astype(str)
    array = np.empty(stored.shape, stored.dtype)
    if array.size:
        stored.read_direct(array)
    return array


def _read_metadata(group: h5py.Group) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, item in group.items():
        if isinstance(item, h5py.Group):
            values[name] = _read_metadata(item)
        elif item.attrs.get("encoding") == "json":
            values[name] = json.loads(item.asstr()[()])
        elif item.shape is None:  # an empty HDF5 dataspace
            values[name] = None
        elif item.shape:
            values[name] = _read(item)
        else:
            value = item[()]
            values[name] = value.decode() if isinstance(value, bytes) else value.item()
    return values


# --------------------------------------------------------------------------- writing


def write_d4rl(dataset: Dataset, path: str | Path) -> None:
    """Write a record as a file that D4RL's own functions can use; it appears whole, or not at all.

    Where nothing is known of what followed the last row of any episode, ``next_observations`` is left out:
    they are the following rows. Where that holds for some episodes only, ``infos/next_known`` says in
    which rows they are real. Arrays are not compressed: float data hardly gets smaller, and slow to read.

    Raises:
        TypeError: metadata that neither JSON nor HDF5 can hold.
        ValueError: a name in metadata or infos that HDF5 cannot have.
    """
    with replace_file(Path(path), "w+b") as stream, h5py.File(stream, "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
            file[name] = getattr(dataset, name)
        ends = dataset.terminals | dataset.timeouts
        if dataset.next_known[ends].any():
            file["next_observations"] = dataset.next_observations
            if not dataset.next_known.all():
                file[NEXT_KNOWN] = dataset.next_known
        for name, values in dataset.infos.items():
            _check_name("infos", name)
            text = values.dtype.kind == "U"
            file[f"infos/{name}"] = values.astype(h5py.string_dtype()) if text else values
        if dataset.metadata:
            _write_metadata(file.create_group("metadata"), dataset.metadata)


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip("/.") or name.startswith("/") or name == "next_known":
        raise ValueError(f"{where}: got the name {name!r}; allowed: a text without a leading slash")


def _write_metadata(group: h5py.Group, values: dict[str, Any], where: str = "metadata") -> None:
    for name, value in values.items():
        _check_name(where, name)
        if "/" in name:
            raise ValueError(f"{where}: got the name {name!r}; allowed: one without a slash")
        if isinstance(value, dict) and value:
            _write_metadata(group.create_group(name), value, f"{where}[{name!r}]")
        elif isinstance(value, np.ndarray | np.generic | str | bool | int | float):
            group[name] = value
        else:
            try:
                group[name] = json.dumps(value)
            except TypeError as error:
                allowed = "what JSON can hold, and arrays"
                raise TypeError(f"{where}[{name!r}]: {error}; allowed: {allowed}") from error
            group[name].attrs["encoding"] = "json"


# --------------------------------------------------------------------------- D4RL's own view


def qlearning_view(
    data: Dataset | str | Path, *, terminate_on_end: bool = False, max_episode_steps: int = 1000
) -> dict[str, np.ndarray]:
    """The transitions that D4RL's ``qlearning_dataset`` makes: for comparison with published results.

    It never reads stored next observations: that of row i is the observation of row i + 1, whatever
    episode that belongs to. Rows with a timeout are left out, and the last row always. With
    ``terminate_on_end`` timeouts are kept, with the first observation of the next episode as their
    successor and without a terminal, whatever the name says.

    Args:
        data: a record or a file. A record has no timeout in a row that is terminal too; D4RL leaves such
            rows of a file out.
        max_episode_steps: of files without timeouts, where D4RL counts: a row is left out when its number
            in the episode is ``max_episode_steps - 1``, counted from 0 in the first episode and behind a
            row that was left out, and from 1 behind any other end, as D4RL counts.

    Returns:
        observations, actions, next_observations, rewards (float32), terminals (bool), each [m, ...].
    """
    timeouts: np.ndarray | None
    if isinstance(data, Dataset):
        observations, actions, rewards = data.observations, data.actions, data.rewards
        terminals, timeouts = data.terminals, data.timeouts
    else:
        with _open(data) as file:
            observations, actions, rewards = (_read(file[name]) for name in REQUIRED[:3])
            n = len(observations)
            terminals = as_flags("terminals", file["terminals"][()], n)
            timeouts = as_flags("timeouts", file["timeouts"][()], n) if "timeouts" in file else None
            rewards = as_column("rewards", rewards, n)
    if timeouts is None:
        timeouts = _counted_timeouts(terminals, terminate_on_end, max_episode_steps)
    kept = np.flatnonzero(~timeouts[:-1] | terminate_on_end)
    columns = {
        "observations": observations[kept], "actions": actions[kept],
        "next_observations": observations[kept + 1], "rewards": rewards[kept],
    }  # fmt: skip
    return {k: v.astype(np.float32, copy=False) for k, v in columns.items()} | {"terminals": terminals[kept]}


def _counted_timeouts(terminals: np.ndarray, kept: bool, max_episode_steps: int) -> np.ndarray:
    timeouts = np.zeros(len(terminals), bool)
    step = 0
    for row, terminal in enumerate(terminals.tolist()):
        timeouts[row] = step == max_episode_steps - 1
        if terminal or timeouts[row]:
            step = 0
        # A row that is left out is not counted; the first row behind a terminal therefore has number 1.
        step += kept or not timeouts[row]
    return timeouts


# --------------------------------------------------------------------------- names and scores


def environment_name(name: str) -> str:
    """The environment in a D4RL or Gymnasium name: "hopper" of "hopper-medium-v2", "hopper", "Hopper-v5".

    Raises:
        ValueError: none of those with published reference returns; names the nearest.
    """
    environment = name.partition("-")[0].lower()
    if environment not in REFERENCE_RETURNS:
        allowed = "names beginning with " + ", ".join(REFERENCE_RETURNS)
        hint = did_you_mean(environment, REFERENCE_RETURNS)
        raise ValueError(f"name={name!r} has no reference returns; allowed: {allowed}{hint}")
    return environment


def gymnasium_id(name: str) -> str:
    """The Gymnasium environment of a D4RL name: "Hopper-v5" of "hopper-medium-v2".

    D4RL collected in older versions of it: observations and rewards mean the same, the physics differs a
    little.

    Raises:
        ValueError: as `environment_name`.
    """
    return GYMNASIUM_IDS[environment_name(name)]


def normalized_score(name: str, returns: Any) -> Any:
    """D4RL's score: ``100 * (return - random) / (expert - random)`` with its published mean returns.

    Args:
        name: of a data set or environment, see `environment_name`.
        returns: a number or an array; the score has its shape.

    Raises:
        ValueError: as `environment_name`.
    """
    random, expert = REFERENCE_RETURNS[environment_name(name)]
    return 100 * (np.asarray(returns, np.float64) - random) / (expert - random)
