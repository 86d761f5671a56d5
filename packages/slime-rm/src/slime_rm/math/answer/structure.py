r"""What kind of answer an answer is: a number with its unit, a set, an interval, an equation, ...

Importing this takes seconds, for sympy's sake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_rm.math.answer.expression import Expression
from slime_rm.math.answer.units import Unit


@dataclass(frozen=True)
class Quantity:
    """A number or formula, with the unit behind it if there is one, in percent or not."""

    value: Expression
    unit: Unit | None = None
    percent: bool = False


@dataclass(frozen=True)
class BaseNumber:
    """Digits in a base other than ten."""

    digits: str
    base: int


@dataclass(frozen=True)
class Several:
    """What stands in brackets, or in a row without any.

    Attributes:
        kind: `list` has no brackets; `sequence` has round, square or angle ones, and may be an interval; `ratio`
            is written with colons; `union`, `intersection` and `difference` are of sets.
        parts: in the order of the answer.
        mark: the two brackets of a sequence; the word that joins a list (`or`, `and`, or a comma).
    """

    kind: Literal["list", "set", "sequence", "ratio", "union", "intersection", "difference"]
    parts: tuple[Answer, ...]
    mark: str = ","


@dataclass(frozen=True)
class Table:
    """A matrix, or the lines of a definition by cases, row by row."""

    kind: Literal["matrix", "cases"]
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Universe:
    r"""A set with a name of its own, such as `\mathbb{R}`."""

    name: str


@dataclass(frozen=True)
class Named:
    """`x = 5` or `x ∈ S`: a value, and what it is the value of."""

    name: str
    value: Answer


@dataclass(frozen=True)
class Relation:
    """An equation that no name stands alone in, or an inequality: sides, and the signs between them."""

    signs: tuple[str, ...]
    sides: tuple[Answer, ...]


@dataclass(frozen=True)
class Congruence:
    """`x ≡ 3 (mod 5)`."""

    residue: Quantity
    modulus: Quantity


@dataclass(frozen=True)
class Rounded:
    """`≈ 3.14`, or `π ≈ 3.14` with the exact value before the sign."""

    exact: Answer | None
    value: Answer


@dataclass(frozen=True)
class Condition:
    """Words that are a case's condition, such as `otherwise`."""

    text: str


Answer = (
    Quantity | BaseNumber | Several | Table | Universe | Named | Relation | Congruence | Rounded | Condition
)

_NAMES: dict[type, str] = {
    Quantity: "a value",
    BaseNumber: "a number in a base",
    Universe: "a set",
    Named: "a named value",
    Relation: "an equation or inequality",
    Congruence: "a congruence",
    Rounded: "a rounded value",
    Condition: "words",
}


def kind_of(answer: Answer) -> str:
    """Return in words what kind of answer `answer` is."""
    if isinstance(answer, Several):
        if answer.kind == "sequence":
            return f"a tuple or interval {answer.mark[0]}...{answer.mark[1]}"
        return f"a {answer.kind}"
    if isinstance(answer, Table):
        return "a matrix" if answer.kind == "matrix" else "a definition by cases"
    return _NAMES[type(answer)]
