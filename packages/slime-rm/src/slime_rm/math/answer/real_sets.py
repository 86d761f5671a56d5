"""Sets of real numbers: intervals, inequalities, unions of them. Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from sympy import S, Symbol, oo
from sympy.sets import Complement, FiniteSet, Intersection, Interval, Set, Union
from sympy.sets.fancysets import Reals

from slime_rm.math.answer.expression import Expression
from slime_rm.math.answer.structure import Answer, Named, Quantity, Relation, Several, Universe
from slime_rm.math.answer.values import same_value, worked_out

MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne", "=": "="}
"""What a sign of relation becomes when its sides change places."""
_BOUNDED: dict[str, Callable[[Any], Set]] = {
    "<": lambda bound: Interval.open(-oo, bound),
    r"\le": lambda bound: Interval(-oo, bound),
    ">": lambda bound: Interval.open(bound, oo),
    r"\ge": lambda bound: Interval(bound, oo),
    r"\ne": lambda bound: Complement(Reals(), FiniteSet(bound)),
    "=": lambda bound: FiniteSet(bound),
}


def same_real_set(label: Answer, given: Answer) -> bool:
    """Return whether two answers are the same set of real numbers: `x > 3` and `(3, ∞)`; False where one is none."""
    if len(_unknowns(label) | _unknowns(given)) > 1:
        return False
    try:
        one, other = _pieces(_real_set(label)), _pieces(_real_set(given))
    except (TypeError, ValueError):
        return False  # no sets of real numbers
    return len(one) == len(other) and all(
        a[2:] == b[2:] and same_value(a[0], b[0]) and same_value(a[1], b[1])
        for a, b in zip(one, other, strict=True)
    )


def _unknowns(answer: Answer) -> set[str]:
    """Return the names of what `answer` says something about."""
    if isinstance(answer, Named):
        return {answer.name}
    if isinstance(answer, Relation):
        return {
            str(x)
            for side in answer.sides
            if isinstance(side, Quantity)
            for x in side.value.tree.free_symbols
        }
    parts = answer.parts if isinstance(answer, Several) else ()
    return set().union(*map(_unknowns, parts))


def _real_set(answer: Answer) -> Set:
    """Return the set of real numbers that `answer` is.

    Raises:
        TypeError: it is none.
    """
    if isinstance(answer, Named) and not isinstance(answer.value, Quantity):
        return _real_set(answer.value)
    if isinstance(answer, Universe) and answer.name == r"\mathbb{R}":
        return Reals()
    if isinstance(answer, Relation):
        return _solutions(answer)
    if isinstance(answer, Several):
        if answer.kind == "set":
            return FiniteSet(*map(_real, answer.parts))
        if answer.kind == "sequence" and len(answer.parts) == 2 and answer.mark[0] in "([":
            low, high = map(_real, answer.parts)
            if not low < high:
                raise TypeError("no interval")
            return Interval(low, high, answer.mark[0] == "(", answer.mark[1] == ")")
        joins = {"union": Union, "intersection": Intersection, "difference": Complement}
        if answer.kind in joins:
            return joins[answer.kind](*map(_real_set, answer.parts))
        if answer.kind == "list" and answer.mark in ("or", "and"):
            return (Union if answer.mark == "or" else Intersection)(*map(_real_set, answer.parts))
    raise TypeError("no set of real numbers")


def _real(answer: Answer) -> Any:
    if isinstance(answer, Quantity) and answer.unit is None and not answer.percent:
        value = worked_out(answer.value)
        if value.is_extended_real and not value.free_symbols:
            return value
    raise TypeError("no real number")


def _solutions(relation: Relation) -> Set:
    sets = []
    names = set()
    for sign, (left, right) in zip(relation.signs, pairwise(relation.sides), strict=True):
        if isinstance(right, Quantity) and isinstance(right.value.tree, Symbol):
            left, right, sign = right, left, MIRRORED[sign]
        if not isinstance(left, Quantity) or not isinstance(left.value.tree, Symbol):
            raise TypeError("not solved for a name")
        names.add(left.value.tree)
        sets.append(_BOUNDED[sign](_real(right)))
    if len(names) != 1:
        raise TypeError("several names")
    return Intersection(*sets)


def _pieces(numbers: Set) -> list[tuple[Expression, Expression, bool, bool]]:
    pieces: list[Any] = []
    if numbers is S.EmptySet:
        return pieces
    for part in numbers.args if isinstance(numbers, Union) else [numbers]:
        if isinstance(part, FiniteSet):
            pieces += [(point, point, False, False) for point in part.args]
        elif isinstance(part, Interval):
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        else:
            raise TypeError("not worked out")
    pieces.sort(key=lambda piece: (float(piece[0]), float(piece[1])))
    return [(Expression(low, True), Expression(high, True), a, b) for low, high, a, b in pieces]
