"""The benchmark of gradient steps: its options, and its figures against its own samples."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("d3rlpy")

import offline_steps
from offline_steps import BARE, OURS, SAMPLING, Args


def test_options_that_no_run_can_use_are_refused():
    for fields, message in (
        ({"algos": ("discrete-bc",)}, "--algos"),
        ({"algos": ("bc", "bc")}, "--algos"),
        ({"algos": ()}, "--algos"),
        ({"steps": 0}, "--steps is 0"),
        ({"turns": 0}, "--turns is 0"),
        ({"rows": 999}, "--rows is 999"),
    ):
        with pytest.raises(ValueError, match=message):
            offline_steps.check(replace(Args(), **fields))
    assert offline_steps.main(Args(steps=0)) == 2


def test_every_continuous_algorithm_has_a_cost():
    offline_steps.check(Args(algos=tuple(offline_steps.names(discrete=False))))
    assert set(offline_steps.COST) == set(offline_steps.names(discrete=False))


def test_a_small_run_reports_what_it_measured(tmp_path, capsys):
    args = Args(algos=("bc",), steps=20, turns=2, rows=2000, out=tmp_path)
    assert offline_steps.main(args) == 0
    with (tmp_path / "samples.csv").open() as file:
        samples = list(csv.DictReader(file))
    assert [(s["case"], s["arm"], s["turn"]) for s in samples] == [
        (case, arm, turn) for case in ("bc", SAMPLING) for turn in "01" for arm in (OURS, BARE)
    ]
    assert [float(s["steps"]) for s in samples] == [20.0] * 4 + [10.0] * 4
    results = json.loads((tmp_path / "summary.json").read_text())["results"]
    for result, case in zip(results, ("bc", SAMPLING), strict=True):
        ours, bare = (
            np.array([float(s["cpu_seconds"]) for s in samples if (s["case"], s["arm"]) == (case, arm)])
            for arm in (OURS, BARE)
        )
        assert result["speed_ratio_cpu"]["value"] == pytest.approx(np.median(bare / ours), rel=1e-6)
        assert result[f"{OURS}_ms_cpu"]["value"] == pytest.approx(np.median(ours) / result["steps"] * 1e3)
    assert results[0]["reached"] == (results[0]["speed_ratio_cpu"]["value"] >= 1.0)
    assert "target" in capsys.readouterr().out
