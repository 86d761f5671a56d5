"""Reading the structure of an answer. Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sympy import Abs, Rational

from slime_rm.math.answer.expression import Expression
from slime_rm.math.answer.measures import times, times_table
from slime_rm.math.answer.names import is_name
from slime_rm.math.answer.quantities import compound, read_quantity
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
)
from slime_rm.math.answer.tokens import (
    NotUnderstood,
    Token,
    Tokens,
    closes,
    opens,
    outside,
    split,
    tokenize,
    unwrapped,
    wraps,
    written,
)
from slime_rm.math.answer.values import same_value, worked_out

_ORDERS = ("<", ">", r"\le", r"\ge", r"\ne")
_RELATIONS = ("=", *_ORDERS, r"\approx", r"\in", r"\equiv")
_SET_SIGNS = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "difference"}
_ALIGNED = frozenset(
    ["aligned", "align", "split", "gathered", "gather", "equation", "eqnarray", "multline", "center"]
)
_MATRICES = frozenset(["matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"])
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16}  # fmt: skip
_FILLERS = frozenset(["if", "for", "when", "where"])


def read(answer: str, *, letters: frozenset[str] | None) -> Answer:
    """Return the structure of `answer`, which is in plain writing (`notation.plain`).

    Args:
        answer: a label or an answer.
        letters: those of the label, where an answer is read: runs of other letters are words that need to be
            understood. None where the label itself is read.

    Raises:
        NotUnderstood: some of it is not understood; the message says what.
    """
    return _Reader(letters).whole(_turned(tokenize(answer)))


def letters_of(answer: str) -> frozenset[str]:
    """Return the letters that stand in `answer` outside of commands."""
    return frozenset(c for token in tokenize(answer) if token.kind in ("letter", "word") for c in token.text)


def _turned(tokens: Tokens) -> Tokens:
    """Write the open interval `]0,1[` as `(0,1)`."""
    turned = list(tokens)
    beside = ("=", r"\in", *_SET_SIGNS)
    for i, token in enumerate(tokens):
        if token.text == "]" and (i == 0 or tokens[i - 1].text in beside):
            turned[i] = replace(token, text="(")
        if token.text == "[" and (i == len(tokens) - 1 or tokens[i + 1].text in _SET_SIGNS):
            turned[i] = replace(token, text=")")
    return tuple(turned)


@dataclass(frozen=True)
class _Reader:
    letters: frozenset[str] | None

    def whole(self, tokens: Tokens) -> Answer:
        tokens = unwrapped(tokens)
        column = tokens and tokens[0].text == "array" and not any(token.text == "&" for token in tokens)
        if tokens and tokens[0].kind == "begin" and (tokens[0].text in _ALIGNED or column) and wraps(tokens):
            return self.several([row for row in self.lines(tokens[1:-1]) if row], ",")
        if tokens and tokens[0].text == "=":
            tokens = tokens[1:]
        items = split(tokens, ",", ";", r"\\", "and", "or")
        if len(items) == 1:
            return self.item(tokens)
        joins = {
            "and" if sign.marked and sign.text == "," else sign.text for sign, _ in items if sign is not None
        } - {",", ";", r"\\"}
        parts = []
        for (sign, part), (following, _) in zip(items, [*items[1:], (None, ())], strict=True):
            # `1, 2, and 3`: between the comma and the word stands nothing.
            if part or following is None or following.kind != "word" or sign is None or sign.text not in ",;":
                parts.append(part)
        return self.several(parts, joins.pop() if len(joins) == 1 and len(parts) == 2 else ",")

    def lines(self, tokens: Tokens) -> list[Tokens]:
        """Return the rows of an aligned environment, a row that begins with a sign of relation with the one before."""
        rows: list[Tokens] = []
        for _, row in split(tokens, r"\\"):
            row = tuple(token for token in row if token.text != "&")
            if rows and row and row[0].text in _RELATIONS:
                rows[-1] += row
            else:
                rows.append(row)
        return rows

    def several(self, parts: Sequence[Tokens], mark: str) -> Answer:
        if len(parts) == 1:
            return self.whole(parts[0])
        read = [self.item(part) for part in parts]
        first = read[0]
        quantities = [part for part in read if isinstance(part, Quantity)]
        if mark == "and" and len(quantities) == len(read) and (total := compound(quantities)) is not None:
            return total
        if isinstance(first, Named) and not any(isinstance(part, Named | Relation) for part in read[1:]):
            read[0] = first.value  # x = 1, 2
            return Named(first.name, Several("list", _flat(read), mark))
        return Several("list", _flat(read), mark)

    def item(self, tokens: Tokens) -> Answer:
        tokens = unwrapped(tokens)
        if not tokens:
            raise NotUnderstood("something is missing")
        sides = split(tokens, *_RELATIONS)
        if len(sides) > 1:
            return self.relation(
                [sign.text for sign, _ in sides if sign is not None], [side for _, side in sides]
            )
        for sign, kind in _SET_SIGNS.items():
            parts = split(tokens, sign)
            if len(parts) > 1:
                return Several(kind, tuple(self.item(part) for _, part in parts))  # type: ignore[arg-type]  # from _SET_SIGNS
        if len(tokens) == 1 and tokens[0].text == r"\emptyset":
            return Several("set", ())
        if len(tokens) == 1 and tokens[0].text.startswith(r"\mathbb"):
            return Universe(tokens[0].text)
        if wraps(tokens):
            return self.bracketed(tokens)
        if tokens[0].kind == "letter" and tokens[0].text.isupper() and self.is_point(tokens[1:]):
            return Named(tokens[0].text, self.bracketed(tokens[1:]))
        if tokens[-1].kind == "end":
            return self.multiple(tokens)
        if any(token.text in (r"\pm", r"\mp") for token in tokens):
            return Several("list", tuple(self.item(signed) for signed in _signed(tokens)))
        return self.single(tokens)

    def is_point(self, tokens: Tokens) -> bool:
        """Say whether coordinates stand here, as behind the letter of `P(3, 2)`."""
        return wraps(tokens) and tokens[0].text == "(" and len(split(tokens[1:-1], ",")) > 1

    def multiple(self, tokens: Tokens) -> Answer:
        """Read a number times a matrix."""
        at = max(i for i in outside(tokens) if tokens[i].kind == "begin")
        factor, table = tokens[:at], self.bracketed(tokens[at:])
        if factor and factor[-1].text == r"\cdot":
            factor = factor[:-1]
        if [token.text for token in factor] == ["-"]:
            factor = (*factor, Token("number", "1"))
        number = read_quantity(factor, letters=self.letters)
        found = times_table(number, table) if isinstance(table, Table) else None
        if found is None:
            raise NotUnderstood(f"`{written(tokens)}` is no multiple of a matrix")
        return found

    def bracketed(self, tokens: Tokens) -> Answer:
        inside = tokens[1:-1]
        opening, closing = tokens[0].text, tokens[-1].text
        if tokens[0].kind == "begin":
            return self.table(opening, inside)
        if opening == r"\{":
            return self.set(inside)
        if opening in (r"\lfloor", r"\lceil"):
            return self.single(tokens)
        if opening in ("(", "[") and wraps(inside) and inside[0].kind == "begin":
            return self.bracketed(inside)
        parts = [part for _, part in split(inside, ",", ";")]
        if len(parts) == 1 and opening == "(" and closing == ")":
            return self.item(inside)
        if any(token.text in (r"\pm", r"\mp") for token in inside):
            return Several("list", tuple(self.bracketed(signed) for signed in _signed(tokens)))
        mark = "<>" if opening == r"\langle" else opening + closing
        return Several("sequence", tuple(self.item(part) for part in parts), mark)

    def set(self, inside: Tokens) -> Answer:
        if not inside:
            return Several("set", ())
        condition = split(inside, "|", ":")
        if len(condition) == 2 and any(t.text in _RELATIONS for t in condition[1][1]):
            domain = split(condition[0][1], r"\in")
            if not is_name(domain[0][1]) or [written(part) for _, part in domain[1:]] not in (
                [],
                [r"\mathbb{R}"],
            ):
                raise NotUnderstood(f"the set of all `{written(condition[0][1])}` with a condition")
            return self.whole(condition[1][1])  # { x | x > 3 }
        return Several("set", _flat([self.item(part) for _, part in split(inside, ",", ";")]))

    def table(self, name: str, inside: Tokens) -> Answer:
        rows = [split(row, "&") for _, row in split(inside, r"\\") if row]
        if name == "cases":
            if all(len(row) == 1 for row in rows):
                return self.several([row[0][1] for row in rows], ",")
            return Table("cases", tuple((self.case(row[0][1]), self.condition(row[1:])) for row in rows))
        if name in _MATRICES and rows and all(len(row) == len(rows[0]) for row in rows):
            return Table("matrix", tuple(tuple(self.item(cell) for _, cell in row) for row in rows))
        raise NotUnderstood(f"the environment `{name}` is not understood")

    def case(self, tokens: Tokens) -> Answer:
        return self.item(_unended(tokens))

    def condition(self, cells: Sequence[tuple[Token | None, Tokens]]) -> Answer:
        tokens = _unended(tuple(token for _, cell in cells for token in cell))
        while tokens and tokens[0].text in _FILLERS:
            tokens = tokens[1:]
        if tokens and all(token.kind == "word" for token in tokens):
            return Condition(" ".join(token.text.lower() for token in tokens))
        return self.whole(tokens)

    def relation(self, signs: list[str], sides: list[Tokens]) -> Answer:
        if set(signs) == {"="}:
            return self.equation(sides)
        if signs == [r"\in"]:
            return Named(self.name(sides[0]), self.item(sides[1]))
        if signs[-1] == r"\equiv" and len(signs) == 1:
            self.name(sides[0])
            congruence = self.single(sides[1])
            if not isinstance(congruence, Congruence):
                raise NotUnderstood("a congruence without its modulus")
            return congruence
        if signs[-1] == r"\approx" and set(signs[:-1]) <= {"="}:
            return self.rounded(sides)
        if not set(signs) <= set(_ORDERS):
            raise NotUnderstood(f"`{signs[-1]}` is not understood here")
        return Relation(tuple(signs), tuple(self.item(side) for side in sides))

    def rounded(self, sides: list[Tokens]) -> Answer:
        value = self.item(sides[-1])
        if not sides[0] or (len(sides) == 2 and is_name(sides[0])):
            return Rounded(None, value)
        exact = self.item(sides[0]) if len(sides) == 2 else self.equation(sides[:-1])
        plain = exact.value if isinstance(exact, Named) else exact
        if not (
            isinstance(plain, Quantity) and isinstance(value, Quantity) and _rounds(plain, value, sides[-1])
        ):
            raise NotUnderstood("what stands on both sides of `≈` differs")
        return Rounded(exact, value)

    def equation(self, sides: list[Tokens]) -> Answer:
        if is_name(sides[-1]) and not is_name(sides[0]):
            sides = sides[::-1]
        values = [self.item(side) for side in sides[1:]]
        if not is_name(sides[0]):
            values.insert(0, self.item(sides[0]))
            if _all_the_same(values):
                if _is_identity(values):
                    raise NotUnderstood("it says that a formula equals itself")
                return values[-1]
            if len(values) == 2:
                return Relation(("=",), tuple(values))
            raise NotUnderstood("it says that different things are equal")
        numbers = [value for value in values if _is_number(value)]
        if not _all_the_same(numbers):
            raise NotUnderstood("it says that different numbers are equal")
        if _is_number(values[-1]) or not numbers:
            return Named(self.name(sides[0]), values[-1])
        return Named(self.name(sides[0]), numbers[-1])

    def name(self, tokens: Tokens) -> str:
        if not is_name(tokens):
            raise NotUnderstood(f"`{written(tokens)}` is no name")
        return "".join(
            token.text for token in tokens if token.text not in ("{", "}", r"\vec", r"\overrightarrow")
        )

    def single(self, tokens: Tokens) -> Answer:
        parts = split(tokens, ":") if len(split(tokens, ":")) > 1 else split(tokens, "to")
        if len(parts) > 1:
            return Several("ratio", tuple(read_quantity(part, letters=self.letters) for _, part in parts))
        return (
            _congruence(tokens, self.letters)
            or _base_number(tokens)
            or read_quantity(tokens, letters=self.letters)
        )


def _unended(tokens: Tokens) -> Tokens:
    """Return `tokens` without the comma or full stop at the end of a line."""
    return tokens[:-1] if tokens and tokens[-1].text in (",", ";", ".") else tokens


def _flat(parts: Sequence[Answer]) -> tuple[Answer, ...]:
    """Replace lists among `parts`, such as ±1 is, by what they hold."""
    return tuple(
        inner
        for part in parts
        for inner in (part.parts if isinstance(part, Several) and part.kind == "list" else (part,))
    )


def _signed(tokens: Tokens) -> list[Tokens]:
    return [
        tuple(
            Token("sign", signs[token.text], token.spaced)
            if token.text in signs and token.kind == "command"
            else token
            for token in tokens
        )
        for signs in ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})
    ]


def _congruence(tokens: Tokens, letters: frozenset[str] | None) -> Congruence | None:
    places = outside(tokens)
    for i in places:
        if tokens[i].text in (r"\pmod", r"\mod"):
            before, modulus = tokens[:i], unwrapped(tokens[i + 1 :])
            break
    else:
        if len(places) < 2 or tokens[-1].text != ")" or tokens[places[-2] + 1].text != r"\mod":
            return None
        before, modulus = tokens[: places[-2]], tokens[places[-2] + 2 : -1]
    return Congruence(
        read_quantity(before, letters=letters), read_quantity(unwrapped(modulus), letters=letters)
    )


def _base_number(tokens: Tokens) -> Answer | None:
    r"""Read `1011_2` and `\text{1A}_{16}`; None where no number stands before a subscript."""
    at = next((i for i in outside(tokens) if tokens[i].text == "_"), None)
    if not at or (tokens[0].kind != "number" and not (opens(tokens[0]) and tokens[1].kind == "number")):
        return None
    digits = "".join(t.text for t in tokens[:at] if not (opens(t) or closes(t))).upper()
    base_text = "".join(t.text for t in tokens[at + 1 :] if not (opens(t) or closes(t))).lower()
    base_text = base_text.removeprefix("base")
    base = _BASES.get(base_text) or (int(base_text) if base_text.isdecimal() and len(base_text) < 3 else None)
    if base is None or not digits.isalnum() or not 2 <= base <= 36:
        raise NotUnderstood(f"`{written(tokens)}` is no number in a base")
    if any(int(digit, 36) >= base for digit in digits):
        raise NotUnderstood(f"`{digits}` has digits that base {base} does not have")
    if base == 10:
        return Quantity(Expression(Rational(digits), False))
    return BaseNumber(digits.lstrip("0") or "0", base)


def _is_number(answer: Answer) -> bool:
    return isinstance(answer, Quantity) and not answer.value.tree.free_symbols


def _all_the_same(values: Sequence[Answer]) -> bool:
    first = values[0] if values else None
    return all(
        isinstance(first, Quantity)
        and isinstance(value, Quantity)
        and same_value(_number(first), _number(value))
        for value in values[1:]
    )


def _number(quantity: Quantity) -> Expression:
    return times(quantity.value, Rational(1, 100)) if quantity.percent else quantity.value


def _is_identity(values: Sequence[Answer]) -> bool:
    first = values[0]
    return isinstance(first, Quantity) and not _is_number(first) and all(value == first for value in values)


def _rounds(exact: Quantity, rounded: Quantity, tokens: Tokens) -> bool:
    """Return whether `rounded` is `exact` to as many places as it is written with, or cut off there."""
    places = next((len(t.text.partition(".")[2]) for t in tokens if t.kind == "number"), 0)
    wanted, given = worked_out(exact.value), worked_out(rounded.value)
    if wanted.free_symbols or given.free_symbols or not wanted.is_real:
        return False
    distance, unit = Abs(wanted - given), Rational(1, 10**places)
    truncated = distance < unit and Abs(given) < Abs(wanted)
    return bool(distance <= unit / 2) or bool(truncated)
