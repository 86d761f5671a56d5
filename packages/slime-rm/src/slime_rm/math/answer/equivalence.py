"""Whether two answers of any structure are the same answer. Importing this takes seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from sympy import Add, Mul, Rational, Symbol

from slime_rm.math.answer.expression import Expression
from slime_rm.math.answer.measures import is_quotient, same_quantity, same_ratio, times
from slime_rm.math.answer.reading import letters_of, read
from slime_rm.math.answer.real_sets import MIRRORED, same_real_set
from slime_rm.math.answer.structure import (
    Answer,
    BaseNumber,
    Condition,
    Congruence,
    Named,
    Quantity,
    Relation,
    Rounded,
    Several,
    Table,
    Universe,
    kind_of,
)
from slime_rm.math.answer.values import same_value, worked_out

_VARIABLES = re.compile(r"(?:[a-z]|\\[a-z]+)(?:,(?:[a-z]|\\[a-z]+))*\)")
MAX_PARTS = 40
"""Longest list or set whose parts may stand in another order."""


def warm_up() -> None:
    """Compare what takes sympy through its first steps, which cost a second once a process."""
    same(read(r"\frac{1}{2}+\sqrt{8}", letters=None), read(r"2\sqrt{2}+0.5", letters=frozenset()))
    same(read("(x+1)^2", letters=None), read("x^2+2x+1", letters=frozenset("x")))


def read_label(label: str) -> tuple[Answer, frozenset[str]]:
    """Return the structure of a label in plain writing, and the letters in it.

    Raises:
        NotUnderstood: it is not mathematics that we read; only its own writing is then right.
    """
    return read(label, letters=None), letters_of(label)


def difference(label: Answer, letters: frozenset[str], answer: str) -> str:
    """Return what keeps `answer`, in plain writing, from being the label; nothing where it is the label.

    Raises:
        NotUnderstood: some of it is not understood.
    """
    given = read(answer, letters=letters)
    if same(label, given) or same(_only_member(label), _only_member(given)):
        return ""
    kinds = kind_of(label), kind_of(given)
    return (
        "different" if kinds[0] == kinds[1] else f"different: the label is {kinds[0]}, the answer {kinds[1]}"
    )


def same(label: Answer, given: Answer) -> bool:
    """Return whether `given` is the same answer as `label`.

    Lists and sets are the same in any order, tuples, matrices and vectors in their own. An interval may be written
    as an inequality. `x = 5` is 5, and a label's `x =` may be left out; another equation is no value. A unit may
    be left out, or added to a label without one; two units are compared. `10%` is 0.1, and 10 without its sign.

    Raises:
        NotUnderstood: a number in one has no value or is too large to be worked out.
    """
    if isinstance(label, Rounded):
        label = label.value
    if isinstance(given, Rounded):
        exact = given.exact is not None and same(label, given.exact)
        return exact or (_is_decimal(label) and same(label, given.value))
    if isinstance(label, Named) or isinstance(given, Named):
        return _same_named(label, given)
    if (
        isinstance(label, Several)
        and isinstance(given, Several)
        and {label.kind, given.kind} <= {"list", "set"}
    ):
        if not _one_name(label, given):
            return False
        distinct = label.kind == given.kind == "set"
        ones, others = _parts(label, distinct), _parts(given, distinct)
        named = [any(isinstance(part, Named) for part in parts) for parts in (ones, others)]
        return (named[0] == named[1] and _same_parts(ones, others)) or same_real_set(label, given)
    if (
        isinstance(label, Several)
        and isinstance(given, Several)
        and {label.kind, given.kind} == {"sequence", "list"}
    ):
        point, listed = (label, given) if label.kind == "sequence" else (given, label)
        return _same_coordinates(point, listed) or same_real_set(label, given)
    if type(label) is type(given):
        return _same_kind(label, given) or same_real_set(label, given)
    return _same_crosswise(label, given) or same_real_set(label, given)


def _only_member(answer: Answer) -> Answer:
    """Return 5 of `{5}`, which a list of one member is written as; every other answer as it is."""
    inner = answer.value if isinstance(answer, Named) else answer
    if isinstance(inner, Several) and inner.kind == "set" and len(inner.parts) == 1:
        return inner.parts[0] if isinstance(inner.parts[0], Quantity) else answer
    return answer


def _same_kind(label: Answer, given: Answer) -> bool:
    if isinstance(label, Quantity) and isinstance(given, Quantity):
        return same_quantity(label, given)
    if isinstance(label, Several) and isinstance(given, Several):
        if label.kind == given.kind == "ratio":
            return same_ratio(label.parts, given.parts)
        if label.kind == given.kind and label.kind in ("union", "intersection"):
            return _same_parts(label.parts, given.parts)
        marks = {label.mark, given.mark}
        same_marks = len(marks) == 1 or marks == {"()", "<>"}
        return label.kind == given.kind and same_marks and _in_order(label.parts, given.parts)
    if isinstance(label, Table) and isinstance(given, Table):
        return _same_table(label, given)
    if isinstance(label, Relation) and isinstance(given, Relation):
        return _same_relation(label, given)
    if isinstance(label, Congruence) and isinstance(given, Congruence):
        return _same_congruence(label, given)
    return isinstance(label, BaseNumber | Universe | Condition) and label == given


def _same_crosswise(label: Answer, given: Answer) -> bool:
    """Compare a ratio with a quotient, and a vector in angle brackets with a row or column."""
    for one, other in ((label, given), (given, label)):
        if (
            isinstance(one, Several)
            and one.kind == "ratio"
            and len(one.parts) == 2
            and isinstance(other, Quantity)
        ):
            return is_quotient(other, one.parts)
        if (
            isinstance(one, Several)
            and one.kind == "sequence"
            and one.mark == "<>"
            and isinstance(other, Table)
        ):
            flat = [cell for row in other.rows for cell in row]
            return 1 in (len(other.rows), len(other.rows[0])) and _in_order(one.parts, flat)
    return False


def _same_coordinates(point: Several, listed: Several) -> bool:
    """Compare `(1,2)` with `x=1, y=2`, whose names must be in the order of the alphabet."""
    named = [part for part in listed.parts if isinstance(part, Named)]
    names = [part.name for part in named]
    if point.mark != "()" or len(named) < len(listed.parts) or names != sorted(set(names)):
        return False
    return _in_order(point.parts, [part.value for part in named])


def _same_named(label: Answer, given: Answer) -> bool:
    if isinstance(label, Named) and isinstance(given, Named):
        if not _same_name(label.name, given.name):  # y = 2x and x = y/2 are one line
            return _formula(label) and _formula(given) and _proportional(*map(_as_equation, (label, given)))
        return same(label.value, given.value)
    if isinstance(given, Named):
        if isinstance(label, Relation):
            return same_real_set(label, given) or (
                "=" in label.signs and _same_relation(label, _as_equation(given))
            )
        if not (_one_name(label, given) and _in_reading_order(label, given)):
            return False
        if isinstance(label, Several) and label.kind == "list":
            return (
                same(label, Several("list", (given.value,)))
                if len(label.parts) < 2
                else same(label, given.value)
            )
        return same(label, given.value)
    assert isinstance(label, Named)
    if isinstance(given, Relation):
        return same_real_set(label, given) or (_formula(label) and _same_relation(_as_equation(label), given))
    if isinstance(given, Several) and any(isinstance(part, Named) for part in given.parts):
        return _one_name(label, given) and _same_parts(_parts(label, False), _parts(given, False))
    return same(label.value, given)


def _bare(name: str) -> str:
    """Return `f` of `f(x)`."""
    return name.partition("(")[0] or name


def _same_name(one: str, other: str) -> bool:
    """Return whether two names are one: `f(x)` is `f` and `f(t)`, but `f(2)` is not `f(3)`, and `P(A)` not `P(B)`."""
    arguments = one.partition("(")[2], other.partition("(")[2]
    return _bare(one) == _bare(other) and (
        "" in arguments or len(set(arguments)) == 1 or all(_VARIABLES.fullmatch(a) for a in arguments)
    )


def _one_name(label: Answer, given: Answer) -> bool:
    """Return whether no two lists of values are of different names, as x = 1, 2 and y = 1, 2 are."""
    names = _name_of_all(label), _name_of_all(given)
    return "" in names or names[0] == names[1]


def _name_of_all(answer: Answer) -> str:
    """Return the name that all values of a list have; nothing where they have several or none, and for what is no list."""
    if isinstance(answer, Named):
        inner = answer.value
        return _bare(answer.name) if isinstance(inner, Several) and inner.kind in ("list", "set") else ""
    parts = answer.parts if isinstance(answer, Several) and answer.kind in ("list", "set") else ()
    names = {_bare(part.name).partition("_")[0] for part in parts if isinstance(part, Named)}
    return names.pop() if len(names) == 1 and all(isinstance(part, Named) for part in parts) else ""


def _in_reading_order(label: Answer, given: Named) -> bool:
    """Return whether `(y,x) = (1,2)` is not what is given for coordinates without names, which are in the alphabet's order."""
    names = given.name.strip("()").split(",")
    if not (isinstance(label, Several) and label.kind == "sequence") or len(names) < 2:
        return True
    codes = sorted(map(ord, names)) if all(len(name) == 1 for name in names) else []
    beside = bool(codes) and all(b - a == 1 for a, b in pairwise(codes))
    return not beside or names == sorted(names)


def _formula(named: Named) -> bool:
    return isinstance(named.value, Quantity) and bool(named.value.value.tree.free_symbols)


def _as_equation(named: Named) -> Relation:
    return Relation(("=",), (Quantity(Expression(Symbol(named.name), False)), named.value))


def _parts(answer: Answer, distinct: bool) -> list[Answer]:
    """Return the parts of a list or set; `x = 1, x = 2` and `x_1 = 1, x_2 = 2` as values of one name."""
    if isinstance(answer, Named):
        inner = answer.value
        return list(inner.parts) if isinstance(inner, Several) and inner.kind in ("list", "set") else [inner]
    assert isinstance(answer, Several)
    parts = list(answer.parts)
    names = {_bare(part.name).partition("_")[0] for part in parts if isinstance(part, Named)}
    if len(names) == 1 and all(isinstance(part, Named) for part in parts):
        parts = [part.value for part in parts if isinstance(part, Named)]
    if distinct and len(parts) <= MAX_PARTS:
        kept: list[Answer] = []
        for part in parts:
            if not any(same(other, part) for other in kept):
                kept.append(part)
        return kept
    return parts


def _in_order(label: Sequence[Answer], given: Sequence[Answer]) -> bool:
    if len(label) != len(given):
        return False
    return all(same(one, other) for one, other in zip(label, given, strict=True))


def _same_parts(label: Sequence[Answer], given: Sequence[Answer]) -> bool:
    """Return whether two lists hold the same parts in any order."""
    if len(label) != len(given) or len(label) > MAX_PARTS:
        return len(label) == len(given) and _in_order(label, given)
    left = list(given)
    for one in label:
        found = next((i for i, other in enumerate(left) if same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _is_decimal(answer: Answer) -> bool:
    if isinstance(answer, Named):
        answer = answer.value
    return isinstance(answer, Quantity) and answer.value.decimal


def _minus(a: Expression, b: Expression) -> Expression:
    return Expression(Add(a.tree, Mul(-1, b.tree, evaluate=False), evaluate=False), a.decimal or b.decimal)


def _same_table(label: Table, given: Table) -> bool:
    if label.kind != given.kind or len(label.rows) != len(given.rows):
        return False
    rows = [Several("sequence", row) for row in label.rows], [Several("sequence", row) for row in given.rows]
    return _in_order(*rows) if label.kind == "matrix" else _same_parts(*rows)


def _same_congruence(label: Congruence, given: Congruence) -> bool:
    if not same(label.modulus, given.modulus):
        return False
    a, b, n = (worked_out(q.value) for q in (label.residue, given.residue, label.modulus))
    if all(x.is_Integer for x in (a, b, n)) and n != 0:
        return bool((a - b) % n == 0)
    return same(label.residue, given.residue)


def _same_relation(label: Relation, given: Relation) -> bool:
    """Compare what is left of the sides' difference: a line is one however its terms are arranged.

    A label that is solved for its only unknown, such as `x > 3`, wants an answer that is.
    """
    if len(label.signs) != len(given.signs):
        return False
    if _in_order(label.sides, given.sides) and label.signs == given.signs:
        return True
    mirrored = tuple(MIRRORED[sign] for sign in reversed(given.signs))
    if _in_order(label.sides, given.sides[::-1]) and label.signs == mirrored:
        return True
    if len(label.signs) > 1 or _solved(label):
        return False
    return _proportional(label, given)


def _solved(relation: Relation) -> bool:
    sides = [side.value.tree for side in relation.sides if isinstance(side, Quantity)]
    return any(
        isinstance(a, Symbol) and not b.free_symbols for a, b in (sides, sides[::-1]) if len(sides) == 2
    )


def _proportional(label: Relation, given: Relation) -> bool:
    ones, others = (
        [side.value for side in relation.sides if isinstance(side, Quantity) and side.unit is None]
        for relation in (label, given)
    )
    if len(ones) != 2 or len(others) != 2:
        return False
    one, other = _minus(*ones), _minus(*others)
    symbols = worked_out(one).free_symbols
    if not symbols or worked_out(other).free_symbols != symbols:
        return False
    at = {symbol: Rational(1777 + 331 * i, 1009) for i, symbol in enumerate(sorted(symbols, key=str))}
    a, b = worked_out(one).subs(at), worked_out(other).subs(at)
    if a == 0 or b == 0 or not (a.is_real and b.is_real):
        return False
    sign = given.signs[0] if a * b > 0 else MIRRORED[given.signs[0]]
    return sign == label.signs[0] and same_value(times(one, 1 / a), times(other, 1 / b))
