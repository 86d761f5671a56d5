"""Evaluating arithmetic that a policy wrote: numbers and operators alone, exact, and bounded in length and size."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

#: Longest expression, characters.
MAX_LENGTH = 200
#: Most bits of a numerator or a denominator, on the way as well.
MAX_BITS = 512
#: Digits of a result that is no whole number.
DIGITS = 12

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}


def evaluate(expression: str) -> str:
    """Return the value of an expression over numbers, `+ - * / // % **` and parentheses, as text.

    A value that is no whole number is rounded to 12 significant digits.

    Raises:
        ValueError: it is no such expression, divides by 0, or is too long or too large; says why.
    """
    text = expression.strip()
    if len(text) > MAX_LENGTH:
        raise ValueError(f"more than {MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DIGITS}g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only numbers and + - * / // % ** ( )")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent.numerator) * bits > MAX_BITS:
        raise ValueError("a power that is too large, or no whole one")
    return base**exponent.numerator


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("too large")
    return value
