"""What every task of mathematics is: problems in three splits, and a mark for each response."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from llmgym.checks import check_count, check_name
from llmgym.row_random import FloatArray
from llmgym.token_rewards import STATUS_DTYPE, Scores, StrArray
from llmgym.verifiers.math import grade

SPLITS = ("train", "validation", "held_out")
VALIDATION_SHARE, HELD_OUT_SHARE = 0.1, 0.2
VERIFIERS = ("strict", "lenient")

# The verifier's statuses in the words that the rewards of all token environments use. Only the first two
# are judgements; the others say why there was none.
STATUS_OF_GRADE = {
    "correct": "scored",
    "wrong": "scored",
    "no_answer": "unparsed",
    "over_limits": "unparsed",
    "timed_out": "timed_out",
    "unparsable_truth": "error",
    "needs_extra": "error",
}


@dataclass(frozen=True)
class Problem:
    """One problem.

    prompt: what the solver reads.
    truth: the true answer alone; "" where the task's own scorer can do without.
    solution: a right response in full, which supervised fine-tuning can be given; None where none is known.
    entry: the problem as its library has it, where its scorer needs that.
    """

    prompt: str
    truth: str
    solution: str | None
    entry: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Marks:
    """The marks of N responses.

    score: float64 [N], 1 for a right answer. A task's own scorer may give parts of it for other answers.
    status: str [N], "scored", "unparsed", "timed_out" or "error", as `llmgym.token_rewards.Scores` has it.
    """

    score: FloatArray
    status: StrArray


Marker = Callable[[Sequence[Problem], Sequence[str]], Marks]


def mark_answers(problems: Sequence[Problem], responses: Sequence[str]) -> Marks:
    """Mark N responses to N problems by `llmgym.verifiers.math.grade`: 1 if correct, else 0."""
    grades = grade(responses, [problem.truth for problem in problems])
    status = [STATUS_OF_GRADE[word] for word in grades.status.tolist()]
    return Marks(grades.score, np.array(status, dtype=STATUS_DTYPE))


def as_written(response: str) -> str:
    """The response itself."""
    return response


@dataclass(frozen=True, eq=False)
class MathTask:
    """Problems in three splits that share none, and how responses to them are marked.

    | field | type | meaning |
    |---|---|---|
    | `name` | str | what messages call the task |
    | `train`, `validation`, `held_out` | `Problem`s | the splits |
    | `mark` | function | marks responses to problems: `mark_answers`, or a scorer of the task's own |
    | `read` | function | how a response is read before it is marked: `as_written`, or digits turned round |

    Raises:
        ValueError: a split or a prompt is empty, or two splits have a prompt in common.
    """

    name: str
    train: Sequence[Problem]
    validation: Sequence[Problem]
    held_out: Sequence[Problem]
    mark: Marker = mark_answers
    read: Callable[[str], str] = as_written

    def __post_init__(self) -> None:
        split_of_prompt: dict[str, str] = {}
        for name in SPLITS:
            problems = self.split(name)
            if not problems:
                raise ValueError(f"{self.name}: the split {name!r} is empty; allowed: at least one problem")
            for problem in problems:
                if not problem.prompt:
                    raise ValueError(f"{self.name}: a prompt of the split {name!r} is empty")
                other = split_of_prompt.setdefault(problem.prompt, name)
                if other != name:
                    raise ValueError(
                        f"{self.name}: the splits {other!r} and {name!r} both have the prompt "
                        f"{problem.prompt[:80]!r}; allowed: splits that share none"
                    )

    def split(self, name: str) -> Sequence[Problem]:
        """The problems of a split, "train", "validation" or "held_out"."""
        return tuple(getattr(self, check_name("split", name, SPLITS)))

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str], verifier: str = "strict"
    ) -> Scores:
        """The reward of N responses to N problems; the prompts' own text is never looked at.

        The components are `strict`, the score of `mark`, and `lenient`, which is 1 where the true answer
        occurs anywhere in the response: in a list of guesses, or in a longer number (where no true answer is
        known, it is `strict`). `verifier` says which
        of them is paid; a policy that is paid for the lenient one can be caught at it by the other.
        """
        check_name("verifier", verifier, VERIFIERS)
        read = [self.read(response) for response in responses]
        marks = self.mark(problems, read)
        lenient = [
            float(_plain(problem.truth) in _plain(text)) if problem.truth else score
            for problem, text, score in zip(problems, read, marks.score.tolist(), strict=True)
        ]
        components = {"strict": marks.score, "lenient": np.array(lenient)}
        return Scores(components[verifier], components, marks.status)

    def all_problems(self) -> list[Problem]:
        """Those of the three splits."""
        return [problem for name in SPLITS for problem in self.split(name)]

    def characters(self) -> str:
        """Every character of the prompts, solutions and truths of all splits, sorted."""
        found: set[str] = set()
        for problem in self.all_problems():
            found.update(problem.prompt, problem.truth, problem.solution or "")
        return "".join(sorted(found))


def _plain(text: str) -> str:
    return text.replace(",", "")  # 1,000 is 1000


def same_words(text: str) -> str:
    """What two texts have in common that differ in blanks and capitals only."""
    return " ".join(text.lower().split())


def split_of(key: str) -> str:
    """The split that a problem belongs to, by a hash of what identifies it: 70%, 10% and 20%.

    Nothing else enters, no seed either: what one run trains on, no run of another seed holds out.
    """
    number = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    if number < VALIDATION_SHARE:
        return "validation"
    return "held_out" if number < VALIDATION_SHARE + HELD_OUT_SHARE else "train"


def in_splits(
    keyed: Iterable[tuple[str, Problem]],
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """The problems of "train", "validation" and "held_out"; `split_of` the key of each decides."""
    splits: dict[str, list[Problem]] = {name: [] for name in SPLITS}
    for key, problem in keyed:
        splits[split_of(key)].append(problem)
    return splits["train"], splits["validation"], splits["held_out"]


def draw_problems(problems: Sequence[Problem], n: int | None, seed: int, field: str) -> Sequence[Problem]:
    """`n` different ones of the problems, drawn by `seed`, in the order drawn; None: all as they are.

    Raises:
        ValueError: fewer than `n` are there; `field` is what the message calls `n`.
    """
    if n is None:
        return problems
    if check_count(field, n) > len(problems):
        raise ValueError(f"{field}: got {n}; allowed: at most {len(problems)}, the problems there are")
    drawn = np.random.default_rng(seed).permutation(len(problems))[:n]
    return [problems[k] for k in drawn.tolist()]
