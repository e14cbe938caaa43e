"""What an answer says: numbers, names, equations, lists, sets, tuples, intervals, expressions, words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmgym.verifiers.exact import (
    GROUPED,
    NotANumber,
    NotFinite,
    Number,
    decimal_key,
    parse_arithmetic,
    parse_quantity,
)
from llmgym.verifiers.normalise import CLOSERS, MAX_CHARS, MAX_PLAIN, OPENERS, OverLimits, normalise

MAX_ITEMS = 50


@dataclass(frozen=True)
class Expression:
    """A formula that is no rational number, in the plain spelling."""

    text: str


@dataclass(frozen=True)
class Equation:
    """left = right, neither being a name alone."""

    left: str
    right: str


@dataclass(frozen=True)
class Words:
    """Anything that is no mathematics."""

    text: str


@dataclass(frozen=True)
class Named:
    """name = value; `text` is the value as it was written."""

    name: str
    value: Parsed
    text: str = ""


@dataclass(frozen=True)
class Group:
    """kind: "list", "set", "union", "ratio", or the two brackets of a tuple or an interval."""

    kind: str
    items: tuple[Parsed, ...]


@dataclass(frozen=True)
class Invalid:
    """Nothing, NaN, an infinity alone, or a division by zero: equal to nothing."""

    text: str


Parsed = Number | Expression | Equation | Words | Named | Group | Invalid

NAME = re.compile(
    r"(?:[A-Za-z][A-Za-z' ]{0,30}|\\?[a-z]+ ?|[A-Za-z]_\{?[A-Za-z0-9]\}?)(?:\([a-zA-Z0-9]{1,3}\))?"
)
# Possessive throughout: what is no expression must not be tried in every other way.
EXPRESSION = re.compile(
    r"(?:\\(?:frac|sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|binom|arcsin|arccos|arctan|theta|alpha|beta"
    r"|gamma|lambda|mu|phi|omega|sigma|delta|epsilon|overline"
    r"|begin ?\{[pbv]?matrix\}|end ?\{[pbv]?matrix\}|\\)"
    r"(?![A-Za-z])|[0-9.]++|(?<![A-Za-z])(?:sin|cos|tan|log|ln|sqrt|exp|pi)(?![A-Za-z])"
    r"|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])|[-+*/^_(){}\[\]|!&∞° ])++"
)
ADJACENT = re.compile(r"(?<![_0-9])[0-9.]++ +[0-9.]|[0-9]\.[0-9]*\.|[0-9]_")
BASE = re.compile(r"([0-9A-F]+)_ ?\{? ?([0-9]{1,2}) ?\}?")
SEPARATOR = re.compile(r"\s+(?:or|and)\s+|\s*[,;]\s*(?:(?:or|and)\b\s*)?")
GROUPED_VALUE = re.compile(rf"[^,;]*= ?[-+]? ?[$€£¥₹]? ?(?:{GROUPED})(?:\.[0-9]+)?[^,;0-9]*")  # x = 1,080
RELATION = re.compile(r"[<>≤≥]")
RANGE = re.compile(r"[0-9](?:[0-9,.]*[0-9])? ?- ?[0-9][0-9,.]*")
RATIO = re.compile(r"[^:]+(?::[^:]+)+")
NOT_FINITE = re.compile(r"[-+]?\s*(?:nan|inf|infinity|∞|none|null|undefined)", re.IGNORECASE)


def split_top(text: str, pattern: re.Pattern[str]) -> list[str]:
    """`text` split at the matches of `pattern` outside all brackets; of any kind, as in "[2,5)"."""
    if not pattern.search(text):
        return [text]
    depths, depth = [], 0
    for char in text:
        depth += (char in OPENERS) - (char in CLOSERS)
        depths.append(depth)
    parts, start = [], 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0 and (match.end() == len(text) or depths[match.end() - 1] == 0):
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in (*parts, text[start:])]


COMMA, EQUALS, UNION, APPROXIMATELY = (re.compile(pattern) for pattern in ("[,;]", "=", "∪", "≈"))


def checked(items: list[str]) -> list[str]:
    """`items` if they are at most MAX_ITEMS, else OverLimits."""
    if len(items) > MAX_ITEMS:
        raise OverLimits(f"{len(items)} members; allowed: at most {MAX_ITEMS}")
    return items


def encloses(text: str) -> bool:
    """Whether the first bracket of `text` is closed by its last character, of any kind."""
    if len(text) < 2 or text[0] not in OPENERS or text[-1] not in CLOSERS:
        return False
    depth = 0
    for index, char in enumerate(text):
        depth += (char in OPENERS) - (char in CLOSERS)
        if depth == 0:
            return index == len(text) - 1
    return False


def parse(text: str, commas_separate: bool = False) -> Parsed:
    """What the text of an answer says. Raises OverLimits.

    commas_separate: every comma separates, none groups digits, as inside brackets.
    """
    if MAX_CHARS < len(text) <= MAX_PLAIN:
        key = decimal_key(text.strip())
        if key is not None:
            return Number(key)
    return parse_plain(normalise(text).strip("$ ").rstrip(".").strip(), commas_separate)


def parse_plain(text: str, commas_separate: bool, depth: int = 0) -> Parsed:
    """`parse` for text in the plain spelling."""
    text = strip_braces(text.strip())
    if depth > 6:
        raise OverLimits("brackets and relations nested too deeply")
    if not text or NOT_FINITE.fullmatch(text):
        return Invalid(text) if "∞" not in text else Expression(text)
    if not (commas_separate and "," in text):
        quantity = parse_quantity(text)
        if quantity is not None:
            return quantity
    if text[0] == "≈":
        return parse_plain(text[1:], commas_separate, depth + 1)
    text = split_top(text, APPROXIMATELY)[0]
    if text == "∅":
        return Group("set", ())
    base = BASE.fullmatch(text)
    if base:
        return Group("base", (Words(base[1]), Words(base[2])))
    if RANGE.fullmatch(text):
        return Words(text)
    enclosed = encloses(text)
    items = (
        []
        if enclosed or (not commas_separate and GROUPED_VALUE.fullmatch(text))
        else checked([item for item in split_top(text, SEPARATOR) if item])
    )
    if len(items) > 1 and (commas_separate or parse_rational(text) is None):
        return Group("list", tuple(parse_plain(item, commas_separate, depth + 1) for item in items))
    parts = checked(split_top(text, UNION))
    if len(parts) > 1:
        return Group("union", tuple(parse_plain(part, True, depth + 1) for part in parts))
    if "∈" in text:
        return parse_plain(text.split("∈", 1)[1], commas_separate, depth + 1)
    if "=" in text or RELATION.search(text):
        return parse_relation(text, commas_separate, depth)
    if enclosed:
        return parse_bracketed(text, depth)
    if text.count("±") == 1:
        return Group("list", tuple(parse_plain(text.replace("±", s), False, depth + 1) for s in ("+", "-")))
    if RATIO.fullmatch(text):
        return Group("ratio", tuple(parse_plain(part, False, depth + 1) for part in checked(text.split(":"))))
    try:
        return parse_arithmetic(text)
    except NotFinite:
        return Invalid(text)
    except NotANumber:
        pass
    return Expression(text) if is_expression(text) else Words(text)


def is_expression(text: str) -> bool:
    """Whether a text can be a formula: known commands, numbers, short names; no two numbers side by side."""
    return EXPRESSION.fullmatch(text) is not None and ADJACENT.search(text) is None


def strip_braces(text: str) -> str:
    """`text` without braces that enclose all of it."""
    while text.startswith("{") and text.endswith("}") and encloses(text):
        text = text[1:-1].strip()
    return text


def parse_rational(text: str) -> Number | None:
    """The rational number that a text writes, or None."""
    try:
        return parse_arithmetic(text)
    except NotANumber:
        return None


def parse_bracketed(text: str, depth: int) -> Parsed:
    """A set, a tuple or an interval; a bracket round one thing is that thing, unless it is a set."""
    kind, inner = text[0] + text[-1], text[1:-1].strip()
    items = checked(split_top(inner, COMMA))
    if kind == "⦃⦄":
        return Group("set", tuple(parse_plain(item, True, depth + 1) for item in items if item))
    if len(items) > 1 and all(items):
        return Group(kind, tuple(parse_plain(item, True, depth + 1) for item in items))
    if kind == "()":
        return parse_plain(inner, False, depth + 1)
    return Expression(text) if is_expression(text) else Words(text)


def parse_relation(text: str, commas_separate: bool, depth: int) -> Parsed:
    """An equation, a named value, the last member of a calculation, or an inequality as an interval."""
    if RELATION.search(text):
        return parse_inequality(text, depth)
    members = checked([member for member in split_top(text, EQUALS) if member])
    if len(members) < 2:
        return Words(text)
    *others, last = members
    if NAME.fullmatch(last) and len(others) == 1 and not NAME.fullmatch(others[0]):
        others, last = [last], others[0]  # 5 = x
    if len(others) == 1 and NAME.fullmatch(others[0]):
        name = others[0].replace(" ", "").strip("{}")
        return Named(name, parse_plain(last, commas_separate, depth + 1), last)
    if len(others) > 1 or is_number(others[0]):
        return parse_plain(last, commas_separate, depth + 1)
    return Equation(others[0], last) if is_expression(text.replace("=", "+")) else Words(text)


def is_number(text: str) -> bool:
    """Whether the text writes a rational number or a calculation."""
    return parse_quantity(text) is not None or parse_rational(text) is not None


INTERVAL_LEFT = {"<": "(", "≤": "[", ">": "(", "≥": "["}
INTERVAL_RIGHT = {"<": ")", "≤": "]", ">": ")", "≥": "]"}


def parse_inequality(text: str, depth: int) -> Parsed:
    """x < 9 as (-∞,9), 1 < x ≤ 2 as (1,2], of one variable."""
    parts = [part.strip() for part in RELATION.split(text)]
    signs = RELATION.findall(text)
    if "=" in text or not all(parts) or len(parts) > 3 or len({sign in "<≤" for sign in signs}) != 1:
        return Words(text)
    if signs[0] in ">≥":
        parts.reverse()
        signs.reverse()
    names = [bool(re.fullmatch(r"[A-Za-z]|\\[a-z]+ ?", part)) for part in parts]
    if sum(names) != 1 or (len(parts) == 3 and not names[1]):
        return Words(text)
    low: Parsed = Expression("-∞")
    high: Parsed = Expression("∞")
    left, right = "(", ")"
    name = parts[names.index(True)].strip()
    if not names[0]:
        low, left = parse_plain(parts[0], True, depth + 1), INTERVAL_LEFT[signs[0]]
    if not names[-1]:
        high, right = parse_plain(parts[-1], True, depth + 1), INTERVAL_RIGHT[signs[-1]]
    return Named(name, Group(left + right, (low, high)))
