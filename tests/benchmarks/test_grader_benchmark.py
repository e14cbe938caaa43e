"""benchmarks/grader.py: its rows, counts and options."""

import json
from dataclasses import replace

import pytest

from common.grader_measure import agreement, measure_hostile, measure_speed
from common.grader_rows import CASES, Row, hostile_rows, labels_path, made_up_rows, read_cases, read_labels
from grader import Args, check, draw, verdicts
from llmgym.verifiers.math import grade


def test_rows_are_read(tmp_path):
    cases = read_cases(CASES)
    assert len(cases) == 143 and sum(case.doubtful for case in cases) == 21
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps({"solution": "A: 5", "truth": "5", "is_correct": True}) + "\n")
    assert read_labels(path) == [Row("A: 5", "5", True)]
    assert labels_path(path) == path


def test_made_up_solutions_are_labelled_right():
    rows = made_up_rows(50, seed=3)
    assert {row.right for row in rows} == {True, False}
    assert (grade([r.response for r in rows], [r.truth for r in rows]).score == 1).tolist() == [
        r.right for r in rows
    ]


def test_no_hostile_row_is_right_and_the_number_is_as_asked():
    rows = hostile_rows(read_cases(CASES), 60, 3, seed=1)
    assert len(rows) == 60 and sum(row.name == "hanging" for row in rows) == 3
    assert not any(row.right for row in rows)
    assert rows == hostile_rows(read_cases(CASES), 60, 3, seed=1)


def test_agreement_counts_by_hand():
    rows = [Row("", "", True, "a"), Row("", "", True, "b"), Row("", "", False, "c"), Row("", "", False, "d")]
    counts = agreement("rows", "grader", rows, ([True, False, True, None], [0.0, 3.0, 0.0, 10.0]))
    assert (counts.n, counts.agree, counts.false_accepts, counts.false_rejects) == (4, 1, 1, 1)
    assert (counts.killed, counts.slow, counts.disagreements) == (1, 2, ["b", "c", "d"])


def test_measures_and_figure(tmp_path):
    clean = made_up_rows(200, seed=0)
    bad = hostile_rows(read_cases(CASES), 20, 0, seed=0)
    hostile = measure_hostile(clean, bad, time_limit=1.0, rounds=1)
    assert (hostile.n_clean, hostile.n_hostile, hostile.wrong_scores) == (200, 20, 0)
    assert hostile.neighbours_unchanged and sum(hostile.statuses.values()) == 20
    assert hostile.bound == 2 * hostile.clean + hostile.n_timed_out
    speed = measure_speed(clean, rounds=2, per_round=50, with_math_verify=False)
    assert len(speed.samples["ours"]) == 2 and speed.ratio is None
    table = [agreement("format cases", "llmgym", [Row("", "", True, "a")], ([False], [0.0]))]
    lines = verdicts(table, speed, hostile)
    assert lines[0] == "format cases: 0 of 1, target all: MISSED (a)"
    assert draw(table, speed, hostile, tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rounds": 0}, "--rounds"), ({"hanging": 2_000}, "--hanging"), ({"time_limit": 0.0}, "--time-limit")],
)
def test_options_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        check(replace(Args(), **change))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="--labels"):
        check(Args(labels=tmp_path / "none.jsonl"))
