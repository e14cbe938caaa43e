"""One plain spelling for what LaTeX, Unicode and typists write in many ways.

`normalise` turns an answer into a string over ASCII and a few single signs: ``-`` for every minus, ``*`` for
every multiplication sign, ``^{..}`` for superscripts, ``⦃ ⦄`` for the braces of a set (plain braces group),
``∞ ± ∪ ∈ ≈ ≤ ≥ ≠ ° ∅`` for their commands. Text is never evaluated, here or later.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 500  # of one answer, unless it is a plain decimal number
MAX_PLAIN = 10_000  # digits of a plain decimal number, which is compared and not calculated with
MAX_NESTING = 20  # of brackets, and of roots and fractions
MAX_DIGITS = 1_000  # of a number that is calculated with
MAX_EXPONENT = 1_000  # of scientific notation


class OverLimits(Exception):
    """An answer is longer, deeper or larger than the limits of this module."""


SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True))
SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑‒﹣－", "-"),
        **dict.fromkeys("×✕✖·⋅∙∗", "*"),
        **dict.fromkeys("÷∕⁄／", "/"),
        **dict.fromkeys(
            "\u00a0\u1680\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "
        ),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
        **{chr(code): "" for code in (*range(9), *range(14, 32), 127)},
        **dict.fromkeys("’‘′", "'"),
        "＋": "+",
        "＝": "=",
        "，": ",",
        "．": ".",
        "％": "%",
        "＄": "$",
        "（": "(",
        "）": ")",
        "√": r"\sqrt ",
        "π": r"\pi ",
        "⩽": "≤",
        "⩾": "≥",
        "º": "°",
        "˚": "°",
    }
)
# A command and its plain spelling. `\text` and its like vanish: what they hold stays, in its braces.
COMMANDS = {
    **dict.fromkeys(("left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg"), ""),
    **dict.fromkeys(("displaystyle", "textstyle", "limits"), ""),
    **dict.fromkeys((",", ";", ":", " ", "quad", "qquad", "thinspace", "enspace"), " "),
    **dict.fromkeys(("!", "(", ")", "[", "]"), ""),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "frac"), r"\frac"),
    **dict.fromkeys(("cdot", "times", "ast"), "*"),
    **dict.fromkeys(("le", "leq", "leqslant"), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant"), "≥"),
    **dict.fromkeys(("ne", "neq"), "≠"),
    **dict.fromkeys(("lt",), "<"),
    **dict.fromkeys(("gt",), ">"),
    **dict.fromkeys(("{", "lbrace"), "⦃"),
    **dict.fromkeys(("}", "rbrace"), "⦄"),
    **dict.fromkeys(("emptyset", "varnothing"), "∅"),
    **dict.fromkeys(("approx", "approxeq", "sim"), "≈"),
    **dict.fromkeys(("degree", "circ"), "°"),
    **dict.fromkeys(("lparen",), "("),
    **dict.fromkeys(("rparen",), ")"),
    **dict.fromkeys(("lbrack",), "["),
    **dict.fromkeys(("rbrack",), "]"),
    "div": "/",
    "%": "%",
    "$": "$",
    "pm": "±",
    "cup": "∪",
    "in": "∈",
    "infty": "∞",
    "pounds": "£",
    "euro": "€",
    "dots": "...",
    "ldots": "...",
    "cdots": "...",
}
TEXT_COMMANDS = ("text", "textbf", "textit", "textrm", "textnormal", "mathrm", "mathbf", "mathit", "mathsf",
                 "mbox", "hbox", "boxed", "fbox", "operatorname", "mathbb", "mathcal", "emph")  # fmt: skip
COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
TEXT_COMMAND = re.compile(r"\\(?:" + "|".join(TEXT_COMMANDS) + r")\s*\{([^{}]*)\}")
SUPERSCRIPT = re.compile("[" + "".join(SUPERSCRIPTS) + "]+")
OPENERS, CLOSERS = "([{⦃", ")]}⦄"


def _spell_command(match: re.Match[str]) -> str:
    name = match.group(1)
    if name in COMMANDS:
        return COMMANDS[name]
    return "" if name in TEXT_COMMANDS else match.group(0) + (" " if name.isalpha() else "")


def _spell_odd(char: str) -> str:
    """A digit of another script as ASCII, a fraction sign as a fraction, anything else as it is."""
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    if unicodedata.category(char) == "No":
        parts = unicodedata.normalize("NFKC", char).split("⁄")
        if len(parts) == 2 and parts[0].isdecimal() and parts[1].isdecimal():
            return rf"\frac{{{parts[0]}}}{{{parts[1]}}}"
    return char


def check_nesting(text: str) -> None:
    """Raise OverLimits where brackets are nested deeper than MAX_NESTING."""
    depth = 0
    for char in text:
        if char in OPENERS:
            depth += 1
            if depth > MAX_NESTING:
                raise OverLimits(f"brackets nested deeper than {MAX_NESTING}")
        elif char in CLOSERS:
            depth -= 1


def normalise(text: str) -> str:
    """The plain spelling of an answer, without blanks at its ends. Raises OverLimits."""
    if len(text) > MAX_CHARS:
        raise OverLimits(f"an answer of {len(text)} characters; allowed: at most {MAX_CHARS}")
    if not text.isascii():
        text = SUPERSCRIPT.sub(lambda m: "^{" + "".join(SUPERSCRIPTS[c] for c in m.group()) + "}", text)
        text = text.translate(SIGNS)
        if not text.isascii():
            text = "".join(char if char.isascii() else _spell_odd(char) for char in text)
    elif not text.isprintable():
        text = text.translate(SIGNS)
    check_nesting(text)
    if "\\" in text:
        if text.count("\\frac") + text.count("\\sqrt") > 10 * MAX_NESTING:
            raise OverLimits("too many fractions and roots")
        for _ in range(3):  # \text inside \mathbf; deeper wrappers are nobody's answer
            text, found = TEXT_COMMAND.subn(r" \1 ", text)
            if not found:
                break
        text = text.replace(r"\!", "")
        text = COMMAND.sub(_spell_command, text)
        text = text.replace("^{ °}", "°").replace("^{°}", "°").replace("^°", "°").replace("^ °", "°")
    text = text.replace("{,}", ",").replace("~", " ").replace("**", "^")
    return " ".join(text.split())
