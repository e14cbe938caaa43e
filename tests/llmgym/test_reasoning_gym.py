"""Reasoning Gym's tasks: splits, seeds, its own scorer, tasks that would run text as code, bad input."""

import sys
from itertools import combinations

import pytest

from llmgym.tasks.by_name import as_task
from llmgym.tasks.problems import SPLITS, Problem

pytest.importorskip("reasoning_gym", reason="Reasoning Gym is in the extra llm")
from llmgym.tasks.reasoning_gym import OwnScorer, reasoning_gym  # noqa: E402


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic"])
def test_splits_and_seeds(name):
    tasks = [reasoning_gym(name, n_problems=200, seed=seed) for seed in (0, 1, 77)]
    prompts = {s: {p.prompt.lower() for task in tasks for p in task.split(s)} for s in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert prompts[one] and prompts[other] and not prompts[one] & prompts[other]
    again = reasoning_gym(name, n_problems=200, seed=1)
    assert again.all_problems() == tasks[1].all_problems() != tasks[0].all_problems()
    for problem in tasks[0].all_problems():
        assert problem.truth == problem.solution == problem.entry["answer"]
        assert problem.prompt == problem.entry["question"] + "\n"


def test_truths_of_chain_sum_are_what_python_computes():
    for problem in reasoning_gym(n_problems=100).all_problems():
        assert int(problem.truth) == eval(problem.prompt.split(":")[1].rstrip("= \n"))  # noqa: S307


def test_the_scorer_is_the_tasks_own():
    task = reasoning_gym("chain_sum", n_problems=60)
    problem = next(p for p in task.all_problems() if len(p.truth) == 3)
    said = [
        problem.truth,
        f"<answer> {problem.truth} </answer> I hope",
        "<answer>9</answer>",
        "",
        "0" + problem.truth,
    ]
    scores = task.score([problem] * 5, said)
    assert scores.total[:2].tolist() == [1, 1] and scores.total[4] == 1 and scores.total[2] < 1
    assert list(scores.status) == ["scored", "scored", "scored", "unparsed", "scored"]
    dataset = task.mark.dataset
    assert scores.total[2] == dataset.score_answer("9", problem.entry)
    both = f"<answer>9</answer> no, <answer>{problem.truth}</answer>"
    assert task.score([problem], [both]).total.tolist() == [1]  # the last counts


def test_a_scorer_that_raises_is_an_error_and_no_silent_zero():
    class Scorer:
        def score_answer(self, answer, entry):
            return {"good": 1.0}[answer]

    marks = OwnScorer(Scorer())([Problem("a", "good", None)] * 2, ["bad", "good"])
    assert list(marks.status) == ["error", "scored"] and marks.score.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["countdown", "string_insertion", "n_queens", "puzzle24", "composite"])
def test_tasks_that_evaluate_text_are_refused(name):
    with pytest.raises(ValueError, match=f"task: reasoning_gym:{name} evaluates text as code"):
        reasoning_gym(name)
    if name == "countdown":
        assert reasoning_gym(name, n_problems=60, allow_eval=True).train


def test_tasks_without_an_answer_are_marked_all_the_same():
    task = reasoning_gym("graph_color", n_problems=60)
    problem = task.train[0]
    assert problem.solution is None and problem.truth == ""
    scores = task.score([problem], ["{}"], "lenient")
    assert (
        scores.total.tolist()
        == scores.components["strict"].tolist()
        == [task.mark.dataset.score_answer("{}", problem.entry)]
    )


def test_settings_names_and_the_missing_extra(monkeypatch):
    task = as_task("reasoning_gym:chain_sum", 5, {"n_problems": 60, "min_terms": 2, "max_terms": 2})
    assert task.name == "reasoning_gym:chain_sum" and all(
        p.entry["metadata"]["num_terms"] == 2 for p in task.train
    )
    assert as_task("reasoning_gym", 0, {"n_problems": 60}).name == "reasoning_gym:chain_sum"
    with pytest.raises(ValueError, match="task: got 'chain_som' .did you mean 'chain_sum'"):
        as_task("reasoning_gym:chain_som", 0, {})
    with pytest.raises(TypeError, match="terms"):
        reasoning_gym(terms=3)
    with pytest.raises(ValueError, match="reasoning_gym:chain_sum: max_terms must be >= min_terms"):
        reasoning_gym(min_terms=5, max_terms=2)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"reasoning_gym: not installed; pip install llmgym\[llm\]"):
        reasoning_gym()
