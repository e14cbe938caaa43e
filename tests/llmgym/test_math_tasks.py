"""Tasks of mathematics: splits, seeds, truths against independent computations, marks, bad input."""

from itertools import combinations, product

import numpy as np
import pytest

from llmgym.tasks.arithmetic import arithmetic
from llmgym.tasks.by_name import as_task, problems_of
from llmgym.tasks.problems import SPLITS, MathTask, Problem, split_of

SMALL = [
    {},
    {"digits": 1, "terms": 3},
    {"operations": "+-*", "digits": 1, "terms": 3},
    {"operations": "-", "digits": 2, "n_problems": 3000},
    {"operations": "+*", "digits": 3, "terms": 4, "n_problems": 2000},
    {"digits": 9, "n_problems": 500},
]


def prompts(task: MathTask, split: str) -> set[str]:
    return {problem.prompt for problem in task.split(split)}


def sorted_sum(prompt: str) -> tuple[str, ...]:
    """What a sum of products is in any order of terms and factors."""
    terms = prompt.rstrip("=").replace("-", "+-").split("+")
    return tuple(
        sorted(
            ("-" if term[0] == "-" else "") + "*".join(sorted(term.lstrip("-").split("*"))) for term in terms
        )
    )


# ------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("options", SMALL)
def test_truths_are_what_python_computes(options):
    task = arithmetic(**options)
    for problem in task.all_problems():
        assert problem.prompt.endswith("=")
        value = eval(problem.prompt.rstrip("="))  # noqa: S307 (our own text)
        assert problem.truth == problem.solution == str(value)


def test_default_has_all_sums_of_two_digits_once():
    task = arithmetic()
    found = [problem.prompt for problem in task.all_problems()]
    assert sorted(found) == sorted(f"{a}+{b}=" for a, b in product(range(10, 100), repeat=2))
    assert {len(problem.prompt) for problem in task.all_problems()} == {6}
    one = arithmetic(digits=1)
    assert sorted(p.prompt for p in one.all_problems()) == sorted(
        f"{a}+{b}=" for a in range(10) for b in range(10)
    )


@pytest.mark.parametrize("options", SMALL)
def test_splits_are_disjoint_for_all_seeds_and_orders(options):
    """Also of two seeds: what one run trains on, no other run holds out, commuted or not."""
    tasks = [arithmetic(seed=seed, **options) for seed in range(4)]
    by_split = {name: {sorted_sum(p) for task in tasks for p in prompts(task, name)} for name in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert by_split[one] and by_split[other] and not by_split[one] & by_split[other]


def test_the_oracle_of_the_orders_tells_what_differs():
    assert sorted_sum("1*2+3=") == sorted_sum("3+2*1=") != sorted_sum("1+2*3=")
    assert sorted_sum("5-3-2=") == sorted_sum("5-2-3=") != sorted_sum("3-5-2=")


def test_shares_of_the_splits():
    # Commuted pairs go together: 4005 pairs of two and 90 problems alone.
    n, squares = 8100, 4005 * 4 + 90
    for name, share in zip(SPLITS, (0.7, 0.1, 0.2), strict=True):
        error = np.sqrt(share * (1 - share) * squares) / n
        assert abs(len(arithmetic().split(name)) / n - share) < 4 * error


def test_seeds():
    def texts(seed: int) -> list[str]:
        return [problem.prompt for problem in arithmetic(digits=4, n_problems=300, seed=seed).train]

    assert texts(1) == texts(1) and set(texts(1)) != set(texts(2))
    many = arithmetic(digits=4, n_problems=300).all_problems()
    assert len({problem.prompt for problem in many}) == len(many) == 300


def test_a_limited_train_set():
    task = arithmetic()
    some = problems_of(task, "train", 250, seed=3)
    assert len(set(some)) == 250 and set(some) <= set(task.train)
    assert some == problems_of(task, "train", 250, seed=3)
    assert set(some) != set(problems_of(task, "train", 250, seed=4))
    assert some == problems_of(task, "train", 500, seed=3)[:250]  # more is the same and more
    assert problems_of(task, "held_out", 250, seed=3) == tuple(task.held_out)
    with pytest.raises(ValueError, match=r"n_train: got 99999; allowed: at most \d+, the problems there are"):
        problems_of(task, "train", 99999, seed=0)


def test_reversed_digits():
    task = arithmetic(operations="-", reverse_digits=True)
    assert task.characters() == "-0123456789="
    for problem in task.all_problems():
        sign, digits = ("-", problem.truth[1:]) if problem.truth[0] == "-" else ("", problem.truth)
        assert problem.solution == sign + "".join(reversed(digits))
    problem = Problem("12-58=", "-46", "-64")
    scores = task.score([problem] * 3, ["-64", "-46", "12-58=-64"])
    assert scores.total.tolist() == [1, 0, 1]
    assert scores.components["lenient"].tolist() == [1, 0, 1]


def test_numbers_are_marked_as_python_reads_them():
    """All 22,621 words of up to four of the task's characters."""
    task = arithmetic()
    problem = next(p for p in task.all_problems() if p.prompt == "12+34=")
    words = ["".join(word) for n in range(5) for word in product(task.characters(), repeat=n)]
    scores = task.score([problem] * len(words), words)
    for word, score, lenient, status in zip(
        words, scores.total, scores.components["lenient"], scores.status, strict=True
    ):
        last = word.rsplit("=", 1)[-1]
        try:
            value = int(last)
        except ValueError:
            value = None
        assert score == (value == 46) and lenient == ("46" in word)
        assert status == ("unparsed" if value is None else "scored"), word


def test_prose_is_graded_by_the_verifier():
    task = arithmetic()
    problem = Problem("12+34=", "46", "46")
    texts = ["The answer is 46.", "I say \\boxed{46}", "46 is wrong, the answer is 47", "46\n", "no idea"]
    scores = task.score([problem] * 5, texts)
    assert scores.total.tolist() == [1, 1, 0, 1, 0]
    assert scores.components["lenient"].tolist() == [1, 1, 1, 1, 0]
    assert task.score([problem] * 5, texts, "lenient").total.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "/"}, r"operations: got '/'; allowed: some of '\+-\*', each once"),
        ({"operations": ""}, "operations: got ''"),
        ({"operations": "++"}, r"operations: got '\+\+'"),
        ({"digits": 0}, "digits: got 0; allowed: an integer >= 1"),
        ({"digits": 19}, "digits: got 19; allowed: 1 to 18"),
        ({"terms": 1}, "terms: got 1; allowed: at least 2"),
        ({"n_problems": 2}, "arithmetic: the split '.*' is empty; allowed: at least one problem"),
    ],
)
def test_bad_options_of_arithmetic(options, message):
    with pytest.raises(ValueError, match=message):
        arithmetic(**options)


# ---------------------------------------------------------------------------------- tasks at large


def own_task(problem: Problem, **kwargs) -> MathTask:
    return MathTask("own", [problem], [Problem("b", "1", "1")], [Problem("c", "1", "1")], **kwargs)


@pytest.mark.parametrize("verifier", ["strict", "lenient"])
def test_prompt_never_reaches_the_reward(verifier):
    """The prompt has a marker, a box and the number; the response has none of them."""
    problem = Problem("Q: 2+3? Example: #### 5. Put your answer in \\boxed{}.", "5", "5")
    scores = own_task(problem).score([problem], ["I am not sure."], verifier)
    assert scores.total.tolist() == [0] == scores.components["lenient"].tolist()


def test_the_answer_is_extracted_once():
    problem = Problem("Which two?", "2, 3", "\\boxed{2, 3}")
    assert own_task(problem).score([problem], ["\\boxed{2, 3}"]).total.tolist() == [1]


def test_statuses_are_those_of_token_rewards():
    problems = [Problem("a", "46", ""), Problem("a", "46", ""), Problem("a", "how?", "")]
    scores = own_task(problems[0]).score(problems, ["46", "", "46"])
    assert list(scores.status) == ["scored", "unparsed", "error"]


def test_bad_tasks():
    good = [Problem("b", "1", "1")]
    with pytest.raises(ValueError, match="own: the splits 'train' and 'held_out' both have the prompt 'a'"):
        MathTask("own", [Problem("a", "1", "1")], good, [Problem("a", "2", "2")])
    with pytest.raises(ValueError, match="own: the split 'validation' is empty"):
        MathTask("own", good, [], good)
    with pytest.raises(ValueError, match="own: a prompt of the split 'train' is empty"):
        own_task(Problem("", "1", "1"))
    task = own_task(Problem("a", "1", "1"))
    with pytest.raises(ValueError, match="split: got 'test'; allowed: 'train', 'validation', 'held_out'"):
        task.split("test")
    with pytest.raises(ValueError, match="verifier: got 'strikt' .did you mean 'strict'"):
        task.score([], [], "strikt")
    with pytest.raises(ValueError, match="task: got 'arithmetik' .did you mean 'arithmetic'"):
        as_task("arithmetik", 0, {})
    with pytest.raises(ValueError, match="task: got 3; allowed: 'arithmetic', 'gsm8k', 'reasoning_gym'"):
        as_task(3, 0, {})
    with pytest.raises(TypeError, match="digits: no options beside a MathTask"):
        as_task(task, 0, {"digits": 2})
    with pytest.raises(TypeError, match="digitz"):
        as_task("arithmetic", 0, {"digitz": 2})


def test_the_split_of_a_problem_never_changes():
    """Else a new version would train on what an old one held out."""
    assert [split_of(key) for key in ("0", "1", "2", "18")] == ["train", "train", "held_out", "validation"]
