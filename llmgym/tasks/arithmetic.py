"""Arithmetic on whole numbers: "12+34=" and its answer."""

import re
from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np

from llmgym.checks import check_count
from llmgym.tasks.problems import Marks, MathTask, Problem, as_written, in_splits, mark_answers
from llmgym.token_rewards import STATUS_DTYPE

OPERATIONS = "+-*"
MAX_DIGITS = 18
FORMULA = re.compile("[-+*=0-9 ]*")
NUMBER = re.compile("(?:.*=)? *([-+]?[0-9]{1,400}) *")


def arithmetic(
    operations: str = "+",
    digits: int = 2,
    terms: int = 2,
    reverse_digits: bool = False,
    n_problems: int = 20_000,
    seed: int = 0,
) -> MathTask:
    """Sums, differences and products of numbers, all of the same number of digits.

    A prompt is "12+34=" and its solution "46". Multiplication binds first. If there are at most
    `n_problems` problems, the task has them all: 8,100 for the defaults, a number from 10 to 99 plus
    another (numbers of one digit are 0 to 9). Else so many are drawn.

    **Splits** (70% train, 10% validation, 20% held-out, in expectation) go by a hash of the problem with
    its terms and factors sorted. So "34+12=" is where "12+34=" is, and no split of any seed has a problem,
    in whatever order, that another split has. ("12-34=" and "34-12=" are two problems.)

    **Marks** are those of `mark_numbers`.

    Args:
        operations: those that occur, a choice of "+-*".
        digits: of each number, 1 to 18.
        terms: numbers in a problem, at least 2.
        reverse_digits: solutions are written from the last digit on, "64" for 46, and responses are read
            that way. A sum's digits then depend on those already written, which a model that writes from
            left to right learns with far fewer examples (Lee et al. 2023, "Teaching Arithmetic to Small
            Transformers"). Prompts and truths stay as they are.
        n_problems: the most problems, all splits together.
        seed: of the draw, where there are more.

    Raises:
        ValueError: an argument out of range, or so few problems that a split has none.
    """
    if not operations or set(operations) - set(OPERATIONS) or len(set(operations)) < len(operations):
        raise ValueError(f"operations: got {operations!r}; allowed: some of {OPERATIONS!r}, each once")
    if check_count("digits", digits) > MAX_DIGITS:
        raise ValueError(f"digits: got {digits}; allowed: 1 to {MAX_DIGITS}")
    if check_count("terms", terms) < 2:
        raise ValueError(f"terms: got {terms}; allowed: at least 2")
    check_count("n_problems", n_problems)
    numbers = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    n_possible = len(numbers) ** terms * len(operations) ** (terms - 1)
    alternated = [numbers, *[operations, numbers] * (terms - 1)]
    if n_possible <= n_problems:
        expressions = ["".join(map(str, parts)) for parts in product(*alternated)]
    else:
        random, drawn = Random(seed), dict[str, None]()
        while len(drawn) < n_problems:
            drawn["".join(str(random.choice(part)) for part in alternated)] = None
        expressions = list(drawn)
    train, validation, held_out = in_splits(
        (_key(expression), _problem(expression, reverse_digits)) for expression in expressions
    )
    read = reverse_numerals if reverse_digits else as_written
    return MathTask("arithmetic", train, validation, held_out, mark_numbers, read)


def mark_numbers(problems: Sequence[Problem], responses: Sequence[str]) -> Marks:
    """Mark N responses to arithmetic problems, 1 or 0.

    A response of nothing but digits, signs and blanks must be a number, or end with one behind "=" that
    closes it: "46", "046", "+46" and "12+34=46" are right for 46; "46+", "4+42" and "46=" are not, and say
    "unparsed". Any other response is prose, and marked by `mark_answers`. What a policy over the task's
    own characters writes at random thus needs no grammar for formulas, and is not repaired either.
    """
    scores, status = np.zeros(len(problems)), np.full(len(problems), "scored", STATUS_DTYPE)
    prose = []
    for row, (problem, response) in enumerate(zip(problems, responses, strict=True)):
        if not FORMULA.fullmatch(response):
            prose.append(row)
            continue
        number = NUMBER.fullmatch(response)
        if number is None:
            status[row] = "unparsed"
        else:
            scores[row] = int(number[1]) == int(problem.truth)
    if prose:
        marks = mark_answers([problems[row] for row in prose], [responses[row] for row in prose])
        scores[prose], status[prose] = marks.score, marks.status
    return Marks(scores, status)


def reverse_numerals(text: str) -> str:
    """The text with the digits of each number from last to first: "-64=" for "-46="."""
    return re.sub("[0-9]+", lambda digits: digits[0][::-1], text)


def _problem(expression: str, reverse_digits: bool) -> Problem:
    truth = str(sum(sign * _product(factors) for sign, factors in _signed_products(expression)))
    return Problem(f"{expression}=", truth, reverse_numerals(truth) if reverse_digits else truth)


def _signed_products(expression: str) -> list[tuple[int, list[int]]]:
    """Sign and factors of each term of a sum: 2*3-4 is [(1, [2, 3]), (-1, [4])]."""
    terms = re.findall(r"([+-]?)([0-9*]+)", expression)
    return [(-1 if sign == "-" else 1, [int(factor) for factor in term.split("*")]) for sign, term in terms]


def _product(factors: list[int]) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result


def _key(expression: str) -> str:
    """The same for all orders of terms and of factors."""
    return str(sorted((sign, sorted(factors)) for sign, factors in _signed_products(expression)))
