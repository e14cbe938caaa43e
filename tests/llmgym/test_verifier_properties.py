"""Properties of the grader: it never raises, formatting changes nothing, no wrong number is accepted."""

import string
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmgym.verifiers.exact import decimal_key
from llmgym.verifiers.math import STATUSES, _grade_one, grade

PIECES = st.sampled_from(
    [
        "####", "\\boxed{", "}", "{", "A:", "The answer is ", "answer:", "-", "−", "$", "%", "\\frac", "(",
        ")", "[", "]", "^", "**", "*", "+", "/", "=", "<", "x", "\\pi", "\\sqrt", " ", "\n", ", ", ",", ".",
        " or ", "not ", " cm", "\\text{", "½", "²", "\\pm", "∞", "\\cup", "\\{", "\\}", "_", "|", "!", ":",
        "<think>", "</think>", "<<", ">>", "Question:", "\ud800", "\0", "１", "٣", "million", "°", "\\", "e",
        "e999", "/0", "nan", "\\overline{", "0", "7", "12", "1,234", "1 000", "3.50",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join)
INTEGERS = st.integers(-(10**9), 10**9)
DECIMALS = st.decimals(-(10**9), 10**9, places=3, allow_nan=False, allow_infinity=False)
MARKERS = (
    "#### {}",
    "A: {}",
    "\\boxed{{{}}}",
    "The answer is {}.",
    "Answer: ${}$",
    "So\n#### {}\n",
    "it costs {}.",
)
SLOWLY = settings(max_examples=150, deadline=None, derandomize=True)


def status(response: str, truth: str) -> str:
    """The status of the plain stage; "pending" where sympy would decide."""
    return _grade_one(response, truth)[1]


@SLOWLY
@given(TEXTS, TEXTS | st.just("5"))
def test_never_raises(response, truth):
    assert status(response, truth) in (*STATUSES, "pending")


@SLOWLY
@given(TEXTS)
def test_a_batch_never_raises_where_truths_are_numbers(text):
    grades = grade([text, "#### " + text, f"\\boxed{{{text}}}"], ["5"] * 3, time_limit=5.0)
    assert grades.score.shape == (3,)


@SLOWLY
@given(INTEGERS, st.sampled_from(MARKERS), st.integers(0, 3), st.booleans(), st.booleans())
def test_formatting_of_an_integer_changes_nothing(number, marker, zeros, commas, plus):
    plain = str(number)
    text = f"{number:,}" if commas else plain
    text = ("+" if plus and number >= 0 else "") + text + ("." + "0" * zeros if zeros else "")
    for written in (text, f" {text} ", text.replace("-", "−"), text.replace("-", "- ")):
        assert grade([marker.format(written)], [plain]).status.tolist() == ["correct"], written
        assert grade([marker.format(plain)], [written]).status.tolist() == ["correct"], written


@SLOWLY
@given(DECIMALS, st.sampled_from(MARKERS), st.integers(0, 4), st.booleans())
def test_formatting_of_a_decimal_changes_nothing(number, marker, zeros, commas):
    plain = f"{number:f}"
    text = (f"{number:,f}" if commas else plain) + "0" * zeros
    assert grade([marker.format(text)], [plain]).score[0] == 1
    assert grade([marker.format(plain)], [text]).score[0] == 1


@SLOWLY
@given(INTEGERS | DECIMALS, INTEGERS | DECIMALS, st.sampled_from(MARKERS), st.booleans())
def test_no_wrong_number_is_accepted(said, true, marker, commas):
    assume(Fraction(said) != Fraction(true))
    text = f"{said:,f}" if commas else f"{said:f}" if not isinstance(said, int) else str(said)
    assert grade([marker.format(text)], [str(true)]).score[0] == 0


@SLOWLY
@given(st.integers(-99, 99), st.integers(-5, 5).filter(bool), st.sampled_from(MARKERS[:4]))
def test_no_neighbour_is_accepted(number, step, marker):
    # Close numbers, where signs, prefixes and suffixes of digits are most easily confused.
    assert grade([marker.format(number)], [str(number + step)]).score[0] == 0
    assert grade([marker.format(f"{number}0")], [str(number)]).score[0] == (number == 0)
    if number:
        assert grade([marker.format(number)], [str(-number)]).score[0] == 0


@SLOWLY
@given(st.integers(-99, 99), st.integers(1, 99), st.integers(-99, 99), st.integers(1, 99))
def test_fractions_against_fraction(a, b, c, d):
    right = Fraction(a, b) == Fraction(c, d)
    sign = "-" if a < 0 else ""
    for form in (f"{a}/{b}", f"{sign}\\frac{{{abs(a)}}}{{{b}}}", f"{a} / {b}", f"\\dfrac{{{a}}}{{{b}}}"):
        assert (status(f"\\boxed{{{form}}}", f"{c}/{d}") == "correct") == right, form
        assert (status(f"\\boxed{{{c}/{d}}}", form) == "correct") == right, form


@SLOWLY
@given(st.integers(0, 99), st.integers(1, 9), st.integers(2, 9))
def test_mixed_numbers_against_fraction(whole, a, b):
    assume(a < b)
    value = whole + Fraction(a, b)
    truth = f"{value.numerator}/{value.denominator}"
    assert status(f"\\boxed{{{whole}\\frac{{{a}}}{{{b}}}}}", truth) == "correct"
    assert status(f"#### {whole} {a}/{b}", truth) == "correct"
    assert status(f"#### -{whole} {a}/{b}", f"-{truth}") == "correct"
    assert status(f"#### {whole}{a}/{b}", truth) == ("correct" if whole == 0 else "wrong")


@SLOWLY
@given(st.text(string.digits + ".,-+ ", max_size=12))
def test_keys_of_decimals_are_equal_exactly_where_the_values_are(text):
    key = decimal_key(text)
    if key is not None:
        assert Fraction(key) == Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "0")
        assert decimal_key(key) == key


@SLOWLY
@given(st.lists(INTEGERS, min_size=2, max_size=4), st.lists(INTEGERS, min_size=2, max_size=4), st.randoms())
def test_tuples_are_ordered_and_sets_are_not(left, right, random):
    shuffled = random.sample(left, len(left))
    tuples = [", ".join(map(str, items)) for items in (left, right, shuffled)]
    assert (status(f"\\boxed{{({tuples[1]})}}", f"({tuples[0]})") == "correct") == (left == right)
    assert status(f"\\boxed{{\\{{{tuples[2]}\\}}}}", f"\\{{{tuples[0]}\\}}") == "correct"
    assert (status(f"\\boxed{{\\{{{tuples[1]}\\}}}}", f"\\{{{tuples[0]}\\}}") == "correct") == (
        set(left) == set(right)
    )
