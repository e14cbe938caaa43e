"""The grader of mathematics on rows whose right grade is known."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from verifier_rows import ROWS

from llmgym.verifiers.extract import answer_text
from llmgym.verifiers.math import PLAIN_LINE, STATUSES, _grade_one, extract, grade, is_correct

HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "data" / "answers.jsonl").read_text().splitlines()]
# Where the right grade is a matter of convention and ours is not the one of the row: no unit is converted.
OWN_CONVENTION = {"ANS-164": False}
EXPRESSIONS = {"ANS-189", "ANS-191"}  # right only by algebra, which the llm extra does
LABELS = "labelled_solutions.jsonl"


def labels_path() -> Path | None:
    """The labelled solutions: GSM8K_LABELS, or a data folder in the checkout or beside it."""
    if "GSM8K_LABELS" in os.environ:
        return Path(os.environ["GSM8K_LABELS"])
    root = HERE.parents[1]
    places = [root / "data" / "gsm8k" / LABELS, root.parent / "shared" / "data" / "gsm8k" / LABELS]
    return next((path for path in places if path.exists()), None)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_answer_case(case):
    if case["id"] in EXPRESSIONS:
        pytest.importorskip("latex2sympy2_extended")
    right = OWN_CONVENTION.get(case["id"], case["correct"])
    assert is_correct(case["response"], case["truth"]) == right, case["why"]


def test_the_cases_are_all_there():
    assert len(CASES) == 143
    assert all(case["doubtful"] for case in CASES if case["id"] in OWN_CONVENTION)


def test_conventions():
    pytest.importorskip("latex2sympy2_extended", reason="expressions need pip install llmgym[llm]")
    responses, truths, right = zip(*ROWS, strict=True)
    grades = grade(responses, truths, time_limit=20.0)
    wrong = [
        (response, truth, status, answer)
        for response, truth, score, want, status, answer in zip(
            responses, truths, grades.score, right, grades.status, grades.answers, strict=True
        )
        if score != want
    ]
    assert not wrong
    assert "timed_out" not in grades.status


def test_labelled_solutions():
    path = labels_path()
    if path is None:
        pytest.skip(f"no {LABELS}: set GSM8K_LABELS to its path")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    grades = grade([row["solution"] for row in rows], [row["truth"] for row in rows])
    labels = np.array([row["is_correct"] for row in rows])
    assert len(rows) == 2640
    assert ((grades.score == 1) == labels).all()
    assert set(grades.status) == {"correct", "wrong"}


def test_a_batch_grades_its_rows_as_one_by_one():
    cases = [case for case in CASES if case["tag"] == "fmt"][:60]
    batch = grade([case["response"] for case in cases], [case["truth"] for case in cases])
    for row, case in enumerate(cases):
        alone = grade([case["response"]], [case["truth"]])
        assert (batch.score[row], batch.answers[row], batch.status[row]) == (
            alone.score[0],
            alone.answers[0],
            alone.status[0],
        )


def test_the_record():
    grades = grade(
        ["#### 5", "#### 6", "nothing", "#### 5", f"#### {'(' * 99}5", "#### 1e9999"],
        ["5"] * 3 + ["?", "5", "5"],
    )
    assert grades.score.tolist() == [1, 0, 0, 0, 0, 0]
    assert grades.score.dtype == np.float64
    assert grades.answers[:4] == ["5", "6", None, "5"]
    assert grades.status.tolist() == [
        "correct",
        "wrong",
        "no_answer",
        "unparsable_truth",
        "over_limits",
        "over_limits",
    ]
    assert set(grades.status) <= set(STATUSES)
    empty = grade([], [])
    assert empty.score.shape == (0,) and empty.answers == [] and empty.status.shape == (0,)


@pytest.mark.parametrize(
    "truth", ["see figure", "", " ", "nan", "inf", "5/0", "none", "?", "the red one", "1" + "0" * 20_000]
)
def test_a_truth_that_cannot_be_graded_gives_no_signal(truth):
    grades = grade([f"#### {truth}", "#### 5", truth, f"\\boxed{{{truth}}}"], [truth] * 4)
    assert grades.score.tolist() == [0, 0, 0, 0]
    assert set(grades.status) == {"unparsable_truth"}


def test_the_prompt_is_never_the_answer():
    # The prompt ("Q: 2+3? Example: #### 5. Put your answer in \boxed{}.") holds marker, box and number.
    assert extract("I am not sure.") is None
    assert not is_correct("I am not sure.", "5")
    assert extract("Put your final answer in \\boxed{} after ####") is None


def test_extraction_happens_once():
    assert extract("\\boxed{2, 3}") == "2, 3"
    assert is_correct("\\boxed{2, 3}", "2, 3")
    assert extract("The answer is \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert extract("#### 1,236") == "1,236"


def test_the_short_way_gives_what_the_general_way_gives():
    lines = [
        "#### 5",
        "A: -1,234.50",
        "####57",
        "#### $0012",
        "A: $-3",
        "#### 1,234,567.000",
        "#### -0",
        "#### 12.",
    ]
    taken = 0
    for line in lines:
        for before in ("", "1 + 1 = 2\n", "#### 7\n", "so <<1+1=2>>2\n", "<think>\n", "Question: 5?\nA: 5\n"):
            for truth in ("5", "-1234.5", "57", "12", "-3", "1234567", "0", "3"):
                response = before + line
                short = grade([response], [truth])
                assert (short.answers[0], short.status[0]) == _grade_one(response, truth)
                taken += PLAIN_LINE.fullmatch(line) is not None
    assert taken > 200


def test_a_row_gets_the_same_grade_from_any_thread():
    rows = [case for case in CASES if case["level"] == "gsm8k"][:20]
    responses, truths = [r["response"] for r in rows], [r["truth"] for r in rows]
    expected = grade(responses, truths).status.tolist()
    results: list[list[str]] = []

    def work() -> None:
        for _ in range(125):
            results.append(grade(responses, truths).status.tolist())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 1000 and all(result == expected for result in results)


def test_bad_calls_name_the_row():
    with pytest.raises(TypeError, match="row 1.*NoneType"):
        grade(["#### 5", None], ["5", "5"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="row 0.*int"):
        grade(["#### 5"], [5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="truths: got 1; allowed: 2"):
        grade(["#### 5", "#### 6"], ["5"])
    with pytest.raises(ValueError, match="time_limit"):
        grade(["#### 5"], ["5"], time_limit=0.0)
    with pytest.raises(TypeError, match="response"):
        extract(5)  # type: ignore[arg-type]


def test_a_million_void_markers_are_read_once():
    response = "\\boxed{}" * 100_000 + "#### " * 1000
    assert answer_text(response) is None
