"""Whether two answers say the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from llmgym.verifiers.answers import RANGE, Equation, Expression, Group, Invalid, Named, Parsed, Words
from llmgym.verifiers.exact import Number

# Asks whether two expressions, or two equations, are the same.
Oracle = Callable[[Parsed, Parsed], bool]

MAX_EXPRESSION = 400  # characters of an expression that sympy is asked about
HUGE = re.compile(r"(?:\^|\*\*)[ {(+-]*[0-9]{4}|[0-9]{4} *[)}]? *!|[0-9]{200}")


def separates(truth: Parsed) -> bool:
    """Whether a comma in an answer to this truth separates: the truth is a list."""
    value = truth.value if isinstance(truth, Named) else truth
    return isinstance(value, Group) and value.kind in ("list", "set")


def is_gradable(truth: Parsed, written: str) -> bool:
    """Whether an answer can be compared with this truth: mathematics, or words in ``\\text{}``."""
    if isinstance(truth, Words):
        return bool(re.search(r"\\(?:text|mathrm|mbox)", written)) or bool(RANGE.fullmatch(truth.text))
    if isinstance(truth, Named):
        return is_gradable(truth.value, written)
    if isinstance(truth, Group) and truth.kind == "base":
        return True
    if isinstance(truth, Group):
        return all(is_gradable(item, written) for item in truth.items)
    return not isinstance(truth, Invalid)


def same(answer: Parsed, truth: Parsed, oracle: Oracle) -> bool:
    """Whether an answer says what the truth says. The oracle decides about expressions and equations."""
    if isinstance(answer, Invalid) or isinstance(truth, Invalid):
        return False
    if are_lines(answer, truth):
        return oracle(as_equation(answer), as_equation(truth))
    if isinstance(answer, Named) or isinstance(truth, Named):
        if isinstance(answer, Named) and isinstance(truth, Named) and answer.name != truth.name:
            return False
        return same(
            answer.value if isinstance(answer, Named) else answer,
            truth.value if isinstance(truth, Named) else truth,
            oracle,
        )
    if isinstance(answer, Number) and isinstance(truth, Number):
        return same_number(answer, truth)
    if isinstance(answer, Group) and isinstance(truth, Group):
        return same_group(answer, truth, oracle)
    if isinstance(answer, Words) or isinstance(truth, Words):
        return letters(answer) == letters(truth) != ""
    if isinstance(answer, Group) or isinstance(truth, Group):
        return False
    if isinstance(answer, Equation) != isinstance(truth, Equation):
        return False
    if answer == truth or squeeze(answer) == squeeze(truth):
        return True
    if isinstance(truth, Number) and not is_worked_out(answer):
        return False
    return oracle(answer, truth)


def are_lines(answer: Parsed, truth: Parsed) -> bool:
    """Whether both are equations, one or both of the kind y = 2x + 1.

    x = 5 is none against another name, and 2x = 10 is not yet x = 5.
    """
    if isinstance(truth, Equation):
        return isinstance(answer, Named)
    if not (isinstance(truth, Named) and isinstance(truth.value, Expression)):
        return False
    if isinstance(answer, Named):
        return answer.name != truth.name and isinstance(answer.value, Expression)
    return isinstance(answer, Equation)


def is_small(text: str) -> bool:
    """Whether sympy is asked about an answer: it is short, its exponents and factorials have few digits."""
    return len(text) <= MAX_EXPRESSION and HUGE.search(text) is None


def as_equation(parsed: Parsed) -> Parsed:
    """A named value as an equation: y = 2x + 1 is a line like any other."""
    return Equation(parsed.name, parsed.text) if isinstance(parsed, Named) else parsed


def same_number(answer: Number, truth: Number) -> bool:
    """Equality of rational numbers under the conventions for percent, units and calculations."""
    if not answer.worked_out and truth.worked_out:
        return False
    if answer.unit and truth.unit and answer.unit != truth.unit:
        return False
    if answer.value == truth.value:
        return True
    if answer.percent == truth.percent or isinstance(answer.value, str) or isinstance(truth.value, str):
        return False
    return answer.value == truth.value * (100 if answer.percent else Fraction(1, 100))


def same_group(answer: Group, truth: Group, oracle: Oracle) -> bool:
    """Tuples and intervals in order; lists, sets and unions in any order, sets without repetitions."""
    kinds = {answer.kind, truth.kind}
    if len(kinds) > 1 and kinds != {"list", "set"}:
        return False
    if answer.kind not in ("list", "set", "union"):
        return len(answer.items) == len(truth.items) and all(
            same(a, t, oracle) for a, t in zip(answer.items, truth.items, strict=True)
        )
    if "set" in kinds:
        return contains(answer.items, truth.items, oracle) and contains(truth.items, answer.items, oracle)
    if len(answer.items) != len(truth.items):
        return False
    left = list(truth.items)
    for item in answer.items:
        index = next((i for i, other in enumerate(left) if same(item, other, oracle)), None)
        if index is None:
            return False
        del left[index]
    return True


def contains(items: Sequence[Parsed], others: Sequence[Parsed], oracle: Oracle) -> bool:
    """Whether every one of `others` is among `items`."""
    return all(any(same(item, other, oracle) for item in items) for other in others)


def letters(parsed: Parsed) -> str:
    """Words as they are compared: without case, blanks, and brackets round them."""
    text = parsed.text if isinstance(parsed, Words | Expression) else ""
    return re.sub(r"[\s{}.$]|^\(|\)$", "", text).casefold()


def squeeze(parsed: Parsed) -> str | None:
    """An expression or equation without blanks (no digit stands beside one, or they would join)."""
    if isinstance(parsed, Equation):
        return f"{squeeze(Expression(parsed.left))}={squeeze(Expression(parsed.right))}"
    if not isinstance(parsed, Expression):
        return None
    return re.sub(r"(?<![0-9])\s|\s(?![0-9])", "", parsed.text)


def is_worked_out(answer: Parsed) -> bool:
    """Whether an expression can count for a number: no sum, difference or product sign, no variable."""
    if not isinstance(answer, Expression):
        return False
    text = re.sub(r"\\[a-z]+", "", answer.text)
    return not re.search(r"[*]|(?<=[^\s({\[^])\s*[-+]|[A-Za-z∞]", text)
