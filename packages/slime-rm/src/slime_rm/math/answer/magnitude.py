"""How large an expression gets when it is worked out, without working it out.

sympy evaluates `9^{9^9}` and `(10^9)!` to the last digit, and does not give up on sums of a million terms or on
expanding high powers. A policy that learns to write such things must not stop the grader.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sympy import (
    Add,
    Basic,
    Float,
    Integral,
    Limit,
    Mul,
    Pow,
    Product,
    Rational,
    Sum,
    Symbol,
    binomial,
    exp,
    factorial,
)
from sympy.matrices import MatrixBase

MAX_BITS = 50_000.0
"""Largest number that is worked out, in bits: about 15,000 decimal digits."""
MAX_EXPANDED_POWER = 64
"""Highest power of a sum with symbols in it that is expanded."""

MAX_RADICAND_BITS = 1000.0
"""Largest whole number that a root is taken of, in bits: sympy looks for its factors."""
SYMBOL_BITS = 3.2
"""A symbol's bits: formulas are compared where every symbol is below 2 to this power (`values`)."""

_UNFINISHED = (Sum, Product, Integral, Limit)
_GROWING = (Pow, exp, factorial, binomial)
_HUGE_EXPONENT = 1000.0


def is_tractable(expression: Any) -> bool:
    """Return whether `expression` can be worked out and compared without running away.

    False for numbers beyond `MAX_BITS`, for high powers of symbolic sums, and for sums, products, integrals and
    limits that are still to be worked out. Text is tractable.
    """
    if isinstance(expression, MatrixBase):
        return all(is_tractable(entry) for entry in expression.flat())
    if not isinstance(expression, Basic):
        return True
    return not expression.atoms(*_UNFINISHED) and not any(
        _bits(part) > MAX_BITS or _is_high_power(part) or _is_large_root(part)
        for part in expression.atoms(*_GROWING)
    )


def _is_high_power(part: Basic) -> bool:
    if not isinstance(part, Pow) or not part.base.atoms(Add) or not part.base.free_symbols:
        return False
    return _bits(part.exp) > math.log2(MAX_EXPANDED_POWER)


def _is_large_root(part: Basic) -> bool:
    if not isinstance(part, Pow) or part.exp.is_Integer or part.free_symbols:
        return False
    return _bits(part.base) > MAX_RADICAND_BITS


def _bits(expression: Any) -> float:
    """Return an upper bound of |log2 |x||, for x = `expression` worked out and its symbols small (`SYMBOL_BITS`)."""
    for kind, bound in _BOUNDS:
        if isinstance(expression, kind):
            return bound(expression)
    return max((_bits(arg) for arg in expression.args), default=1.0)


def _two_to_the(bits: float) -> float:
    return math.exp2(min(bits, _HUGE_EXPONENT))


def _rational_bits(x: Any) -> float:
    return max(math.log2(max(abs(int(x.p)), 1)), math.log2(int(x.q)))


def _float_bits(x: Any) -> float:
    return float(abs(x._mpf_[2] + x._mpf_[3]))  # mantissa · 2^exponent; float() would underflow


_BOUNDS: tuple[tuple[type[Any], Callable[[Any], float]], ...] = (
    (Symbol, lambda x: SYMBOL_BITS),
    (Rational, _rational_bits),
    (Float, _float_bits),
    (Add, lambda x: max(map(_bits, x.args)) + math.log2(len(x.args))),
    (Mul, lambda x: sum(map(_bits, x.args))),
    (Pow, lambda x: _bits(x.base) * _two_to_the(_bits(x.exp))),
    (exp, lambda x: 1.5 * _two_to_the(_bits(x.args[0]))),
    (factorial, lambda x: _bits(x.args[0]) * _two_to_the(_bits(x.args[0]))),
    (binomial, lambda x: _two_to_the(_bits(x.args[0]))),
)
