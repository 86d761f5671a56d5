r"""Reading a number with what stands before and behind it: currency, numerals such as "million", percent, units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from sympy import Add, Integer, Mul, Rational

from slime_rm.math.answer.expression import Expression, read_expression
from slime_rm.math.answer.structure import Quantity
from slime_rm.math.answer.tokens import NotUnderstood, Token, Tokens, outside, written
from slime_rm.math.answer.units import MULTIPLIERS, Unit, is_unit_word, named, read_unit

_CURRENCIES = frozenset("$€£¥₹¢")
_TRIGONOMETRIC = frozenset([r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc"])
_DEGREES = frozenset(["°", "deg", "degree", "degrees"])
_SCALES = {"": "degree", "c": "celsius", "celsius": "celsius", "f": "fahrenheit", "fahrenheit": "fahrenheit"}
_BRACES = frozenset("{}()")


def read_quantity(tokens: Tokens, *, letters: frozenset[str] | None) -> Quantity:
    """Return the number or formula that `tokens` write, with its unit.

    Args:
        tokens: all of it.
        letters: of which products of several letters may consist; None for a label, whose unknown words behind a
            number are what is counted.

    Raises:
        NotUnderstood: something before, in or behind the number is not understood.
    """
    tokens, currency = _without_currency(tokens)
    if tokens and tokens[0].kind == "word" and (tokens[0].marked or is_unit_word(tokens[0].text)):
        raise NotUnderstood(f"the text `{tokens[0].text}` before a number is not understood")
    pieces = _pieces(tokens)
    read = [_piece(number, behind, letters) for number, behind in pieces]
    quantity = read[0] if len(read) == 1 else compound(read)
    if quantity is None:
        raise NotUnderstood(f"`{written(tokens)}` is not one quantity")
    if currency is None:
        return quantity
    if quantity.percent or (
        quantity.unit is not None and not quantity.unit.read_as(currency).same_kind(currency)
    ):
        raise NotUnderstood("a currency and another unit")
    return Quantity(quantity.value, currency)


def _without_currency(tokens: Tokens) -> tuple[Tokens, Unit | None]:
    at = 1 if tokens and tokens[0].text in ("+", "-") else 0
    if len(tokens) > at + 1 and tokens[at].kind == "sign" and tokens[at].text in _CURRENCIES:
        return tokens[:at] + tokens[at + 1 :], named(tokens[at].text, trusted=False)
    return tokens, None


def _pieces(tokens: Tokens) -> list[tuple[Tokens, Tokens]]:
    """Cut `5 feet 3 inches` into numbers and what stands behind each."""
    places = outside(tokens)
    trigonometric = any(token.text in _TRIGONOMETRIC for token in tokens)
    pieces: list[tuple[Tokens, Tokens]] = []
    start, unit = 0, None
    for i in places:
        if unit is None:
            if i > start and _begins_unit(tokens, i, trigonometric):
                unit = i
        elif tokens[i].kind == "number" and tokens[i - 1].text not in ("^", "-", "_"):
            pieces.append((tokens[start:unit], tokens[unit:i]))
            start, unit = i, None
    pieces.append((tokens[start:unit], tokens[unit:] if unit is not None else ()))
    return pieces


def _begins_unit(tokens: Tokens, i: int, trigonometric: bool) -> bool:
    token, after = tokens[i], tokens[i + 1 : i + 3]
    if token.kind == "word":
        return token.marked or is_unit_word(token.text)
    if token.kind == "sign" and (token.text == "%" or token.text in _CURRENCIES):
        return True
    if token.text == "^" and not trigonometric:
        rest = [t.text for t in tokens[i + 1 : i + 4]]
        if r"\circ" not in (rest[:1] or [""])[0] and rest[:2] != ["{", r"\circ"]:
            return False
        behind = tokens[i + (2 if rest[0] == r"\circ" else 4) :]
        return all(t.kind in ("word", "letter") for t in behind)
    if token.text in (r"\frac", "("):
        inside = [t for t in tokens[i + 1 :] if t.text not in _BRACES and t.kind != "sign"]
        return bool(inside) and all(t.kind == "word" for t in inside)
    # 9.8 m/s^2: letters are a unit only where no variable could be meant.
    return (
        token.kind == "letter"
        and token.spaced
        and len(after) == 2
        and after[0].text in ("/", r"\cdot")
        and after[1].kind in ("letter", "word")
        and not any(t.kind == "letter" for t in tokens[:i])
        and read_unit(_unit_words(tokens[i:]) or [""], trusted=False) is not None
    )


def _piece(number: Tokens, behind: Tokens, letters: frozenset[str] | None) -> Quantity:
    value = read_expression(number, letters=letters)
    if not behind:
        return Quantity(value)
    refused = NotUnderstood(f"`{written(behind)}` behind the number is no known unit")
    factor, rest = 1, list(behind)
    while rest and rest[0].kind == "word" and rest[0].text.lower() in MULTIPLIERS:
        factor *= MULTIPLIERS[rest[0].text.lower()]
        rest = rest[1:]
    if factor > 1:
        value = Expression(Mul(value.tree, Integer(factor), evaluate=False), value.decimal)
    if not rest:
        return Quantity(value)
    if rest[0].text in ("%", "percent"):
        if len(rest) > 1 or factor > 1:
            raise refused
        return Quantity(value, percent=True)
    words = _unit_words(tuple(rest))
    if words is None:
        raise refused
    if len(words) == 1 and words[0] == _ordinal(value):
        return Quantity(value)
    unit = read_unit(words, trusted=letters is None)
    if unit is None:
        raise refused
    return Quantity(value, unit)


def _ordinal(value: Expression) -> str | None:
    """Return how a whole number ends where it is an ordinal: the `nd` of 22nd."""
    if not value.tree.is_Integer or value.decimal:
        return None
    n = int(value.tree)
    return {1: "st", 2: "nd", 3: "rd"}.get(n % 10 if n // 10 % 10 != 1 else 0, "th")


def _unit_words(tokens: Tokens) -> list[str] | None:
    r"""Write `\text{cm}^{2}/\text{s}` as `["cm", "^2", "/", "s"]`; None where more than a unit stands there."""
    words: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token.text == "^":
            text = "".join(t.text for t in rest)
            if degrees := re.match(r"\{?\\circ\}?", text):
                words.append("°")
                del rest[: 3 if degrees[0].startswith("{") else 1]
                continue
            power = re.match(r"-?\d(?!\d)|\{-?\d\}", text)
            if power is None:
                return None
            del rest[: len(power[0])]
            words.append("^" + power[0].strip("{}"))
        elif token.text == r"\frac":
            if "}" not in (t.text for t in rest):
                return None
            middle = next(i for i, t in enumerate(rest) if t.text == "}")
            rest[middle] = Token("sign", "/")
        elif token.text == r"\cdot":
            words.append("*")
        elif token.text in _BRACES or (token.text == "." and words and words[-1].isalpha()):
            continue  # sq. cm
        elif token.kind in ("word", "letter") or token.text in _CURRENCIES or token.text == "/":
            words.append(token.text)
        else:
            return None
    if words and words[0].lower() in _DEGREES:
        scale = "".join(words[1:]).lower()
        return [_SCALES[scale]] if scale in _SCALES else None
    return words or None


def compound(pieces: Sequence[Quantity]) -> Quantity | None:
    """Add `5 feet 3 inches` up; None unless every unit is a smaller one of the same kind than the one before."""
    units = [piece.unit for piece in pieces if piece.unit is not None]
    units = [unit.read_as(units[-1]) for unit in units]
    if len(units) < len(pieces) or any(
        not later.same_kind(earlier) or later.scale >= earlier.scale for earlier, later in pairwise(units)
    ):
        return None
    terms = [
        in_base(replace(piece, unit=unit), units[0].scale) for piece, unit in zip(pieces, units, strict=True)
    ]
    return Quantity(
        Expression(Add(*(t.tree for t in terms), evaluate=False), any(t.decimal for t in terms)), units[0]
    )


def in_base(quantity: Quantity, unit_scale: Fraction = Fraction(1)) -> Expression:
    """Return the value in units of which one is `unit_scale` base units."""
    scale = quantity.unit.scale / unit_scale if quantity.unit is not None else Fraction(1)
    if scale == 1:
        return quantity.value
    factor = Rational(scale.numerator, scale.denominator)
    return Expression(Mul(quantity.value.tree, factor, evaluate=False), quantity.value.decimal)
