"""Reading and writing logged data in the format that a path names."""

from __future__ import annotations

from pathlib import Path

from offline.datasets import Dataset

HDF5_SUFFIXES = (".hdf5", ".h5")
MINARI_PREFIX = "minari:"


def read(path: str | Path) -> Dataset:
    """Read a D4RL file (``.hdf5``, ``.h5``) or a Minari data set (a folder, or "minari:" and its id).

    Raises:
        FileNotFoundError: there is no such data.
        ValueError: the path names neither format; what `read_d4rl` and `read_minari` refuse.
    """
    if _format(path) == "d4rl":
        from offline.d4rl import read_d4rl

        return read_d4rl(path)
    from offline.minari_io import read_minari

    return read_minari(path)


def write(dataset: Dataset, path: str | Path) -> None:
    """Write a record in the format of the path: ``.hdf5`` and ``.h5`` in D4RL's, a folder in Minari's.

    A file is replaced; a folder must not be there yet.

    Raises:
        ValueError: the path names neither format; what `write_minari` cannot hold.
        FileExistsError: the folder is there already.
    """
    if _format(path) == "d4rl":
        from offline.d4rl import write_d4rl

        write_d4rl(dataset, path)
    else:
        from offline.minari_io import write_minari

        write_minari(dataset, path)


def _format(path: str | Path) -> str:
    if isinstance(path, str) and path.startswith(MINARI_PREFIX):
        return "minari"
    suffix = Path(path).suffix.lower()
    if suffix in HDF5_SUFFIXES:
        return "d4rl"
    if suffix and not Path(path).is_dir():
        allowed = f"{' and '.join(HDF5_SUFFIXES)} (D4RL), or a folder (Minari)"
        raise ValueError(f"{path}: a file {suffix} is in neither format; allowed: {allowed}")
    return "minari"
