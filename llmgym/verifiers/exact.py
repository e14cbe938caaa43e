"""Numbers as fractions: exact, without floats, without `eval`, and with limits before any power is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from llmgym.verifiers.normalise import MAX_DIGITS, MAX_EXPONENT, OverLimits
from llmgym.verifiers.units import split_unit

# Thousands separators: a comma or one blank before groups of three digits, or commas in the Indian way.
GROUPED = (
    r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])"
    r"|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])"
)
DECIMAL = rf"(?:{GROUPED}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
PLAIN = re.compile(rf"([-+]?) ?((?:{GROUPED}|[0-9]+)?)(?:\.([0-9]*))?")
SIGNED = re.compile(rf"(?P<sign>[-+]?) ?(?P<money>[$€£¥₹]?) ?(?P<inner>[-+]?) ?(?P<number>{DECIMAL})")
SCIENTIFIC = re.compile(r"\s?[eE]([-+]?[0-9]+)(?![0-9A-Za-z.])")
TIMES_POWER = re.compile(
    r"\s*[*xX]\s*10\s*\^\s*(?:\{\s*([-+]?\s*[0-9]+)\s*\}|([-+]?[0-9]+)|\(([-+]?[0-9]+)\))"
)
FACTORS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
FACTOR = re.compile(r"\s*(" + "|".join(FACTORS) + r")s?\b", re.IGNORECASE)
FRACTION = re.compile(r"[-+]? ?(?:[0-9]+ (?:and )?)?[0-9]+ ?/ ?[0-9]+(?=[ {])")
REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\overline ?\{([0-9]+)\}")
PERCENT = re.compile(r"\s*(?:%|per ?cent(?:age)?\b|pct\b)", re.IGNORECASE)
TOKEN = re.compile(rf"\s*({DECIMAL}|\\frac|[-+*/^(){{}}])")
FRACTION_DIGIT = re.compile(r"\s*([0-9])")


@dataclass(frozen=True)
class Number:
    """A rational number as it was written.

    value: the Fraction, or the digits as a canonical string of a decimal longer than MAX_CHARS.
    worked_out: whether it is a value (a decimal, fraction, mixed number, power) and no sum or product.
    """

    value: Fraction | str
    percent: bool = False
    unit: str | None = None
    worked_out: bool = True


class NotANumber(Exception):
    """The text is no rational number."""


class NotFinite(NotANumber):
    """A division by zero."""


def decimal_key(text: str) -> str | None:
    """The canonical digits of a decimal number ("-1,234.50" -> "-1234.5"), or None.

    Two decimals are equal exactly where their keys are: no int and no float is made, so that thousands of
    digits cost nothing.
    """
    match = PLAIN.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals = match.groups()
    if not whole and not decimals:
        return None
    return canonical(sign, whole.replace(",", "").replace(" ", ""), decimals or "")


def canonical(sign: str, whole: str, decimals: str) -> str:
    """The canonical digits from a sign and the digits before and after the point."""
    key = whole.lstrip("0") or "0"
    decimals = decimals.rstrip("0")
    if decimals:
        key = f"{key}.{decimals}"
    return f"-{key}" if sign == "-" and key != "0" else key


def to_fraction(key: str) -> Fraction:
    """A Fraction from canonical digits. Raises OverLimits."""
    if len(key) > MAX_DIGITS:
        raise OverLimits(f"a number of {len(key)} digits; at most {MAX_DIGITS} are calculated with")
    return Fraction(key)


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent for an integer exponent, its size checked first. Raises OverLimits, NotANumber."""
    if exponent.denominator != 1:
        raise NotANumber("an exponent that is no integer")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent.numerator) > 4 * MAX_DIGITS:
        raise OverLimits("a power with too many digits")
    if base == 0 and exponent <= 0:
        raise NotFinite("zero to a power that is not positive")
    return base ** (exponent.numerator % 2 if bits <= 1 else exponent.numerator)


def parse_quantity(text: str) -> Number | None:
    """A decimal with its sign, currency, percent sign, power of ten and unit; None for anything else."""
    match = SIGNED.match(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    found = FRACTION.match(text)
    if found:
        unit, rest = split_unit(text[found.end() :])
        try:
            return None if rest else Number(parse_arithmetic(found.group()).value, unit=unit)
        except NotANumber:
            return None
    key = decimal_key(match["number"])
    if key is None:
        return None
    end = match.end()
    exponent = 0
    for pattern in (SCIENTIFIC, TIMES_POWER, FACTOR):
        found = pattern.match(text, end)
        if found:
            digits = next(group for group in found.groups() if group)
            name = digits.lower()
            if name not in FACTORS and len(digits) > 8:
                raise OverLimits(f"a power of ten beyond {MAX_EXPONENT}")
            exponent = FACTORS[name] if name in FACTORS else int(digits.replace(" ", ""))
            end = found.end()
            break
    if abs(exponent) > MAX_EXPONENT:
        raise OverLimits(f"a power of ten beyond {MAX_EXPONENT}")
    found = PERCENT.match(text, end)
    if found:
        end = found.end()
    unit, rest = split_unit(text[end:])
    if rest:
        return None
    if "-" in (match["sign"], match["inner"]) and key != "0":
        key = f"-{key}"
    value = to_fraction(key) * Fraction(10) ** exponent
    return Number(value, found is not None, match["money"] or unit)


class _Arithmetic:
    """A recursive-descent parser over `tokens`; the nesting of brackets is limited by `normalise`."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.worked_out = True
        self.depth = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > 50:
            raise OverLimits("an expression nested too deeply")
        value = self.product()
        while self.peek() in ("+", "-"):
            self.worked_out = False
            value = value + self.product() if self.take() == "+" else value - self.product()
            limit(value)
        self.depth -= 1
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while self.peek() in ("*", "/"):
            if self.take() == "*":
                self.worked_out = False
                value = value * self.signed()
            else:
                value = divide(value, self.signed())
            limit(value)
        return value

    def signed(self) -> Fraction:
        if self.peek() in ("+", "-"):
            return self.power() if self.take() == "+" else -self.power()
        return self.power()

    def power(self) -> Fraction:
        value = self.atom()
        if self.peek() == "^":
            self.take()
            self.depth += 1
            if self.depth > 50:
                raise OverLimits("powers of powers")
            value = power(value, self.signed())
            self.depth -= 1
        return value

    def atom(self) -> Fraction:
        token = self.take()
        if token in ("(", "{"):
            value = self.sum()
            if self.take() != {"(": ")", "{": "}"}[token]:
                raise NotANumber("a bracket is not closed")
            return value
        if token == r"\frac":
            self.depth += 1
            if self.depth > 50:
                raise OverLimits("fractions nested too deeply")
            upper = self.atom()
            value = divide(upper, self.atom())
            self.depth -= 1
            return value
        key = decimal_key(token)
        if key is None:
            raise NotANumber(f"{token!r} is no number")
        value = to_fraction(key)
        if self.peek() == r"\frac":  # a mixed number
            part = self.atom()
            if value.denominator != 1 or not 0 <= part < 1:
                raise NotANumber("no mixed number")
            return value + part
        return value


def divide(upper: Fraction, lower: Fraction) -> Fraction:
    """upper / lower. Raises NotFinite."""
    if lower == 0:
        raise NotFinite("a division by zero")
    return upper / lower


def limit(value: Fraction) -> None:
    """Raise OverLimits where a number has outgrown MAX_DIGITS."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * MAX_DIGITS:
        raise OverLimits(f"a number of more than {MAX_DIGITS} digits")


MIXED = re.compile(r"(?<![0-9])([0-9]++)(?: +| and )([0-9]+) ?/ ?([0-9]+)")
FRAC = re.compile(r"\\frac\s*(\{|[0-9])")
TERMS = 400


def tokenise(text: str) -> list[str]:
    """The tokens of an arithmetic expression. Raises NotANumber, OverLimits."""
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    tokens, at = [], 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            if text[at:].isspace():
                break
            raise NotANumber(f"{text[at]!r} is no part of a number")
        at = match.end()
        tokens.append(match.group(1))
        if match.group(1) == r"\frac":  # \frac34 has two arguments of one digit
            for _ in range(2):
                digit = FRACTION_DIGIT.match(text, at)
                if digit is None:
                    break
                tokens.append(digit.group(1))
                at = digit.end()
        if len(tokens) > TERMS:
            raise OverLimits(f"an expression of more than {TERMS} terms")
    return tokens


def parse_arithmetic(text: str) -> Number:
    """The value of an expression of rational numbers. Raises NotANumber, NotFinite, OverLimits."""
    repeating = REPEATING.fullmatch(text)
    if repeating:
        sign, whole, head, period = repeating.groups()
        if len(whole) + len(head) + len(period) > MAX_DIGITS:
            raise OverLimits(f"a number of more than {MAX_DIGITS} digits")
        scale = 10 ** len(head)
        value = Fraction(int(whole + head or "0"), scale)
        value += Fraction(int(period), scale * (10 ** len(period) - 1))
        return Number(-value if sign == "-" else value)
    parser = _Arithmetic(tokenise(text))
    value = parser.sum()
    if parser.at < len(parser.tokens):
        raise NotANumber(f"{parser.peek()!r} is left over")
    return Number(value, worked_out=parser.worked_out)
