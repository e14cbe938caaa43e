"""Whether two expressions are the same, by sympy. Imported in worker processes only: it takes seconds to
load.

The LaTeX grammar is math-verify's (latex2sympy2_extended, an ANTLR parser: text is never evaluated as
Python). The comparison is our own, because math-verify's rounds to six decimals: here equality has to be
proven.
"""

from __future__ import annotations

import re

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from llmgym.verifiers.answers import Equation, Expression, Parsed
from llmgym.verifiers.compare import MAX_EXPRESSION
from llmgym.verifiers.exact import MAX_DIGITS, Number
from llmgym.verifiers.normalise import OverLimits

LATEX = {"∞": r"\infty ", "*": r" \cdot "}
FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|sqrt|exp|pi)(?![A-Za-z])")
ROOT = re.compile(r"\\sqrt *\(([^()]*)\)")
ROOT_OF_ATOM = re.compile(r"\\sqrt *([0-9]+|[A-Za-z])")
DEGREES = re.compile(r"([0-9.]+) ?°")
DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")


class Unreadable(Exception):
    """The grammar does not know the expression."""


def to_latex(text: str) -> str:
    """LaTeX for the grammar from the plain spelling, decimals as exact fractions."""
    if len(text) > MAX_EXPRESSION:
        raise OverLimits(f"an expression of {len(text)} characters; at most {MAX_EXPRESSION}")
    text = FUNCTIONS.sub(r"\\\1 ", text)
    text = ROOT.sub(r"\\sqrt{\1}", text)
    text = ROOT_OF_ATOM.sub(r"\\sqrt{\1}", text)
    text = DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    text = re.sub(r"\^ *\(([^()]*)\)", r"^{\1}", text)
    if "°" in text:
        raise Unreadable(text)
    for sign, command in LATEX.items():
        text = text.replace(sign, command)
    return text


def to_sympy(parsed: Parsed) -> sympy.Basic:
    """The sympy object of a number or an expression. Raises Unreadable, OverLimits."""
    if isinstance(parsed, Number):
        if isinstance(parsed.value, str):
            raise OverLimits(f"a number of more than {MAX_DIGITS} digits")
        return sympy.Rational(parsed.value.numerator, parsed.value.denominator)
    if not isinstance(parsed, Expression):
        raise Unreadable(str(parsed))
    try:
        return latex2sympy(to_latex(parsed.text), conversion_config=ConversionConfig())
    except (MemoryError, RecursionError, OverLimits, Unreadable):
        raise
    except Exception as error:
        raise Unreadable(parsed.text) from error


def oracle(answer: Parsed, truth: Parsed) -> bool:
    """Whether two expressions, or two equations, are proven to be the same."""
    if isinstance(answer, Equation) and isinstance(truth, Equation):
        return same_equation(difference(answer), difference(truth))
    return is_zero(to_sympy(answer), to_sympy(truth))


def difference(equation: Equation) -> sympy.Expr:
    """left - right."""
    return to_sympy(Expression(equation.left)) - to_sympy(Expression(equation.right))


def same_equation(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether a = 0 and b = 0 differ by a factor that is a number."""
    if a == b:
        return True
    if sympy.simplify(b) == 0:
        return bool(sympy.simplify(a) == 0)
    ratio = sympy.simplify(a / b)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def differ_somewhere(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether a and b have clearly different values at one point: quick, and settles nearly every wrong
    answer."""
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {name: sympy.Rational(97 + 20 * i, 89) for i, name in enumerate(names)}
    left, right = (expression.subs(point).evalf(30) for expression in (a, b))
    if not all(value.is_number and value.is_finite for value in (left, right)):
        return False
    return bool(abs(left - right) > sympy.Float("1e-9") * max(abs(left), abs(right)))


def is_zero(a: sympy.Basic, b: sympy.Basic) -> bool:
    """Whether a - b is proven to be zero."""
    if a == b:
        return True
    if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
        if not (isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase)) or a.shape != b.shape:
            return False
        return all(is_zero(x, y) for x, y in zip(a, b, strict=True))
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    if a.has(sympy.oo, sympy.zoo, sympy.nan) or b.has(sympy.oo, sympy.zoo, sympy.nan):
        return False
    if a.free_symbols != b.free_symbols and not (a.free_symbols and b.free_symbols):
        return False
    if differ_somewhere(a, b):
        return False
    return bool(sympy.simplify(a - b) == 0 or (a - b).equals(0) is True)
