"""The reading benchmark: its files, its figures and its verdicts."""

import json

import numpy as np
import pytest

h5py = pytest.importorskip("h5py")

import offline_data as script  # noqa: E402
from common.timing import Sample, Timing  # noqa: E402
from offline.d4rl import read_d4rl  # noqa: E402


def test_the_three_files_hold_the_same_rows(tmp_path):
    script.make_files(tmp_path, 2500, seed=0)
    stored, derived, packed = (read_d4rl(tmp_path / f"{name}.hdf5") for name in script.FILES)
    assert stored.n_episodes == 3 and stored.observations.shape == (2500, 17)
    for other in (derived, packed):
        np.testing.assert_array_equal(other.observations, stored.observations)
        np.testing.assert_array_equal(other.timeouts, stored.timeouts)
        known = other.next_known
        np.testing.assert_array_equal(other.next_observations[known], stored.next_observations[known])
    assert (~derived.next_known).sum() == 3 and packed.next_known.all()
    with h5py.File(tmp_path / "gzip.hdf5") as file:
        assert {file[name].compression for name in file} == {"gzip"}


def samples(ours, theirs):
    """One turn: seconds of each reader; h5py read 100 bytes, the record has 200."""
    return [
        Sample("stored", arm, 0, 1, 1.0, Timing(2 * seconds, seconds), {"bytes": size})
        for arm, seconds, size in ((script.H5PY, theirs, 100), (script.OURS, ours, 200))
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "grown", "endings"),
    [
        (0.3, 0.15, 300.0, ["met", "met"]),
        (0.3, 0.14, 301.0, ["MISSED", "MISSED"]),
        (0.3, 0.3, None, ["met"]),
    ],
)
def test_speed_and_memory_are_judged_against_their_targets(ours, theirs, grown, endings):
    row = script.make_row(samples(ours, theirs), grown)
    assert (row.array_bytes, row.record_bytes) == (100, 200)
    assert row.h5py_ms.value == pytest.approx(2000 * theirs)
    assert row.speed_cpu.value == pytest.approx(theirs / ours)
    assert [line.split()[-1] for line in script.verdicts([row])] == endings


def test_the_script_end_to_end(tmp_path, capsys):
    assert script.main(script.Args(rows=3000, turns=2, out=tmp_path)) == 0
    assert "Reading 3,000 rows, 2 turns" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["file"] for row in summary["rows"]] == ["stored", "derived", "gzip"]
    stored, derived, _ = summary["rows"]
    # 17 + 6 + 1 floats and two flags a row; the record has next observations, an index and a flag more.
    assert stored["array_bytes"] == 3000 * (4 * (17 + 17 + 6 + 1) + 2)
    assert derived["array_bytes"] == 3000 * (4 * (17 + 6 + 1) + 2)
    assert stored["record_bytes"] == derived["record_bytes"] == 3000 * (4 * (17 + 17 + 6 + 1) + 2 + 8 + 1)
    assert stored["speed_cpu"]["n"] == 2
    assert stored["speed_cpu"]["low"] <= stored["speed_cpu"]["value"] <= stored["speed_cpu"]["high"]


def test_bad_options_are_one_line(tmp_path, capsys):
    assert script.main(script.Args(rows=0, out=tmp_path)) == 2
    assert capsys.readouterr().out.startswith("error: --rows is 0") and not list(tmp_path.iterdir())
