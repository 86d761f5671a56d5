"""Whether two quantities, percentages, angles or ratios are the same. Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sympy import Expr, Mul, Pow, Rational, oo, pi

from slime_rm.math.answer.expression import Expression
from slime_rm.math.answer.quantities import in_base
from slime_rm.math.answer.structure import Answer, Quantity, Table
from slime_rm.math.answer.tokens import NotUnderstood
from slime_rm.math.answer.units import Unit
from slime_rm.math.answer.values import same_value, worked_out

_DEGREE, _RADIAN = Unit(powers={"degree": 1}), Unit(powers={"radian": 1})


def same_quantity(label: Quantity, given: Quantity) -> bool:
    """Return whether two numbers with their units are the same; where one has no unit, whether the numbers are."""
    if label.unit is not None and given.unit is not None:
        ours, theirs = label.unit.read_as(given.unit), given.unit.read_as(label.unit)
        label, given = replace(label, unit=ours), replace(given, unit=theirs)
        if not ours.same_kind(theirs):
            angles = {frozenset(ours.powers.items()), frozenset(theirs.powers.items())}
            if angles != {frozenset(_DEGREE.powers.items()), frozenset(_RADIAN.powers.items())}:
                return False
            return same_value(_in_radians(label), _in_radians(given))
        return same_value(in_base(label), in_base(given))
    if label.percent or given.percent:
        return label.unit == given.unit and _same_percent(label, given)
    if same_value(label.value, given.value):
        return True
    return any(q.unit is not None and q.unit.same_kind(_DEGREE) for q in (label, given)) and same_value(
        _in_radians(label), _in_radians(given)
    )


def _in_radians(angle: Quantity) -> Expression:
    if angle.unit is None or not angle.unit.same_kind(_DEGREE):
        return angle.value
    return times(in_base(angle), pi / 180)


def _same_percent(label: Quantity, given: Quantity) -> bool:
    r"""Compare where one has a percent sign: `25\%` is 0.25, and 25 whose sign was left out or added.

    To a bare label below 1 no sign is added: 0.5 is 50%, not 0.5%.
    """
    if label.percent and given.percent:
        return same_value(label.value, given.value)
    percent, bare = (label, given) if label.percent else (given, label)
    if same_value(times(percent.value, Rational(1, 100)), bare.value):
        return True
    if not same_value(percent.value, bare.value):
        return False
    return label.percent or not _is_fraction(label)


def _is_fraction(bare: Quantity) -> bool:
    value = worked_out(bare.value)
    return bool(value.is_number and value.is_real and abs(value) < 1)


def times(expression: Expression, factor: Expr) -> Expression:
    """Return `expression` times `factor`."""
    return Expression(Mul(expression.tree, factor, evaluate=False), expression.decimal)


def same_ratio(label: Sequence[Answer], given: Sequence[Answer]) -> bool:
    """Return whether the terms of two ratios are in proportion; of what may be a time, whether they are the same.

    Raises:
        NotUnderstood: one has no value, is infinite, or is 0 where the other is not.
    """
    ones, others = _terms(label), _terms(given)
    if len(ones) != len(others):
        return False
    if _is_time(label):
        return all(same_value(one, other) for one, other in zip(ones, others, strict=True))
    first = next((number for number, one in enumerate(ones) if worked_out(one) != 0), 0)
    return all(
        same_value(through(one, ones[first]), through(other, others[first]))
        for one, other in zip(ones, others, strict=True)
    )


def _terms(ratio: Sequence[Answer]) -> list[Expression]:
    """Return the terms of a ratio.

    Raises:
        NotUnderstood: one is infinite, and would be in proportion to anything.
    """
    terms = [part.value for part in ratio if isinstance(part, Quantity)]
    if any(worked_out(term).has(oo) for term in terms):
        raise NotUnderstood("a term of a ratio is infinite")
    return terms


def _is_time(ratio: Sequence[Answer]) -> bool:
    """Return whether `3:20` may be a time of day, of which no other ratio is the same."""
    numbers = [worked_out(part.value) for part in ratio if isinstance(part, Quantity)]
    return (
        len(numbers) in (2, 3)
        and all(n.is_Integer for n in numbers)
        and bool(0 <= numbers[0] < 24 and all(10 <= n < 60 for n in numbers[1:]))
    )


def is_quotient(quotient: Quantity, ratio: Sequence[Answer]) -> bool:
    """Return whether `quotient` is the first of two terms of a ratio through the second.

    Raises:
        NotUnderstood: there is no such quotient, as of `0:0`, which times anything is 0.
    """
    if quotient.unit is not None or quotient.percent or _is_time(ratio):
        return False
    above, below = _terms(ratio)
    return same_value(quotient.value, through(above, below))


def through(a: Expression, b: Expression) -> Expression:
    """Return an expression through another; worked out, it has no value where the other is 0."""
    return Expression(Mul(a.tree, Pow(worked_out(b), -1), evaluate=False), a.decimal or b.decimal)


def product(a: Expression, b: Expression) -> Expression:
    """Return the product of two expressions."""
    return Expression(Mul(a.tree, b.tree, evaluate=False), a.decimal or b.decimal)


def times_table(number: Quantity, table: Table) -> Table | None:
    """Return a matrix with each entry times a number; None where one of them has a unit, or an entry is no number."""
    cells = [cell for row in table.rows for cell in row]
    if any(not isinstance(cell, Quantity) or cell.unit or cell.percent for cell in (number, *cells)):
        return None
    return replace(
        table,
        rows=tuple(
            tuple(Quantity(product(number.value, cell.value)) for cell in row if isinstance(cell, Quantity))
            for row in table.rows
        ),
    )
