"""Whether two expressions have the same value. Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from sympy import Abs, Expr, Rational

from slime_rm.math.answer.expression import Expression
from slime_rm.math.answer.magnitude import is_tractable
from slime_rm.math.answer.tokens import NotUnderstood

RELATIVE_TOLERANCE = Rational(1, 10**5)
"""Decimals further apart than this are different, however small they are."""
ABSOLUTE_TOLERANCE = Rational(1, 10**6)
"""Decimals further apart than this are different, however large they are."""
_DIGITS = 40
_EXACT = sympy.Float("1e-28")
_ENOUGH = 4
#: Where formulas are compared: positive and negative, small and large, no two in a simple ratio; then whole numbers.
_POINTS = tuple(
    tuple(Rational(n, 1009) for n in point)
    for point in (
        (1433, 2719, 557, 3391, 877, 1999),
        (613, 467, 2203, 751, 1709, 349),
        (5231, 811, 3779, 4603, 2857, 6121),
        (-1721, -433, -2521, -3137, -907, -2087),
        (-389, 1871, -1213, 2657, -4079, 701),
        (2381, -1051, 733, -1597, 3011, -523),
        (97, 211, 43, 151, 269, 317),
        (-8117, 7013, 6427, -9203, 5519, 8699),
    )
)
#: Where a small term that was added counts, too: formulas with decimals are compared here as well.
_SMALL = tuple(tuple(x / 10**9 for x in point) for point in _POINTS)
_WHOLE = tuple(
    tuple(map(sympy.Integer, point))
    for point in (
        (5, 2, 7, 3, 4, 6),
        (8, 3, 5, 2, 9, 4),
        (7, 6, 3, 8, 5, 1),
        (9, 4, 8, 6, 7, 3),
        (6, 1, 4, 2, 3, 5),
    )
)


def same_value(one: Expression, other: Expression) -> bool:
    """Return whether two expressions are equal: exactly, or within the tolerances where one has decimals.

    Formulas are equal when they are at points where both are real, and, where there are none, at whole numbers;
    no simplification is tried, so that this takes milliseconds.

    Raises:
        NotUnderstood: one has no value (`1/0`) or is too large to be worked out.
    """
    a, b = worked_out(one), worked_out(other)
    if isinstance(a, Rational) and isinstance(b, Rational) and a == b:
        return True
    decimal = one.decimal or other.decimal
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return _same_number(a, b, decimal=decimal)
    for points in (_POINTS + _SMALL if decimal else _POINTS, _WHOLE):
        agreed = 0
        for x, y in _values(a, b, symbols, points):
            if not _same_number(x, y, decimal=decimal):
                return False
            agreed += 1
        if agreed >= _ENOUGH:
            return True
    return False


def worked_out(expression: Expression) -> Expr:
    """Return the value of `expression`.

    Raises:
        NotUnderstood: it has none, or is too large to be worked out.
    """
    if not is_tractable(expression.tree):
        raise NotUnderstood("it is too large to be worked out")
    value = expression.tree.doit()
    if value.has(sympy.nan, sympy.zoo):
        raise NotUnderstood("it has no value")
    if not is_tractable(value):
        raise NotUnderstood("it is too large to be worked out")
    return value


def _values(a: Expr, b: Expr, symbols: list[Any], points: Any) -> Iterator[tuple[Any, Any]]:
    complex_meant = a.has(sympy.I) or b.has(sympy.I)
    for point in points:
        # From the seventh symbol on, the values of the first six come again, one more.
        at = {symbol: point[i % 6] + i // 6 for i, symbol in enumerate(symbols)}
        x, y = (_number(side.subs(at)) for side in (a, b))
        if x is None or y is None or not (complex_meant or (_is_real(x) and _is_real(y))):
            continue
        yield x, y


def _number(value: Any) -> Any:
    if value.has(sympy.nan, sympy.zoo, sympy.oo) or not is_tractable(value):
        return None
    number = value.evalf(_DIGITS)
    return number if number.is_number and not number.has(sympy.nan, sympy.zoo, sympy.oo) else None


def _is_real(x: Any) -> bool:
    imaginary = abs(sympy.im(x))
    return bool(imaginary <= _EXACT * max(abs(x), 1))


def _same_number(a: Any, b: Any, *, decimal: bool) -> bool:
    if a == b:
        return True
    if isinstance(a, Rational) and isinstance(b, Rational) and not decimal:
        return False
    infinite = (sympy.oo, -sympy.oo)
    if a in infinite or b in infinite or a.has(*infinite) or b.has(*infinite):
        return False
    if not isinstance(a, Rational) or not isinstance(b, Rational):
        a, b = a.evalf(_DIGITS), b.evalf(_DIGITS)
    distance, size = Abs(a - b), max(Abs(a), Abs(b))
    if decimal:
        return bool(distance <= ABSOLUTE_TOLERANCE and distance <= RELATIVE_TOLERANCE * size)
    return bool(distance <= _EXACT * size) or bool(size < sympy.Float("1e-60"))
