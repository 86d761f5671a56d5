r"""One expression of an answer, read as sympy reads it but without working it out. Importing this takes seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
from sympy import Abs, Add, Expr, Integer, Mul, Pow, Rational, Symbol

from slime_rm.math.answer.tokens import NotUnderstood, Token, Tokens, outside, split, written

_GREEK_NAMES = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho
sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell
"""
GREEK = frozenset("\\" + name for name in _GREEK_NAMES.split())
_CONSTANTS: dict[str, Any] = {r"\pi": sympy.pi, r"\infty": sympy.oo, "e": sympy.E, "i": sympy.I}
_TRIGONOMETRIC: dict[str, tuple[Any, Any]] = {
    r"\sin": (sympy.sin, sympy.asin),
    r"\cos": (sympy.cos, sympy.acos),
    r"\tan": (sympy.tan, sympy.atan),
    r"\cot": (sympy.cot, sympy.acot),
    r"\sec": (sympy.sec, sympy.asec),
    r"\csc": (sympy.csc, sympy.acsc),
    r"\sinh": (sympy.sinh, sympy.asinh),
    r"\cosh": (sympy.cosh, sympy.acosh),
    r"\tanh": (sympy.tanh, sympy.atanh),
}
_FUNCTIONS: dict[str, Any] = {
    r"\arcsin": sympy.asin,
    r"\arccos": sympy.acos,
    r"\arctan": sympy.atan,
    r"\exp": sympy.exp,
    r"\ln": sympy.log,
}
_LOGARITHMS = (r"\log", r"\lg")
_ROOTS = {r"\sqrt": 2, r"\radical": 2, r"\cuberadical": 3}
_END = frozenset(["+", "-", r"\cdot", "/", ")", "]", "}", "|", ",", r"\rfloor", r"\rceil"])


@dataclass(frozen=True)
class Expression:
    """A number or a formula.

    Attributes:
        tree: sympy, not worked out.
        decimal: whether a number in it is written with a point, and so may be rounded.
    """

    tree: Expr
    decimal: bool


def read_expression(tokens: Tokens, *, letters: frozenset[str] | None) -> Expression:
    """Return the expression that `tokens` write.

    Args:
        tokens: all of the expression.
        letters: of which a run of several letters may consist to be a product; None for any.

    Raises:
        NotUnderstood: it is no expression; what it is instead is nobody's guess.
    """
    places = [tokens[i].text for i in outside(tokens)]
    for sign, join in ((r"\over", _quotient), (r"\choose", _binomial)):
        if places.count(sign) == 1:
            above, below = (read_expression(part, letters=letters) for _, part in split(tokens, sign))
            return Expression(join(above.tree, below.tree), above.decimal or below.decimal)
    reader = _Reader(tokens, letters)
    tree = reader.sum()
    if reader.at < len(tokens):
        raise NotUnderstood(
            f"`{written(tokens[reader.at :])}` is not understood after `{written(tokens[: reader.at])}`"
        )
    return Expression(tree, any(token.kind == "number" and "." in token.text for token in tokens))


class _Reader:
    """A reader of sums by recursive descent."""

    def __init__(self, tokens: Tokens, letters: frozenset[str] | None) -> None:
        self.tokens, self.letters, self.at = tokens, letters, 0
        self.raised: int | None = None
        """Where the last exponent in braces ended: a number there is a factor, as in `2^{3}5`."""

    def peek(self, offset: int = 0) -> Token:
        at = self.at + offset
        return self.tokens[at] if at < len(self.tokens) else Token("sign", "")

    def inner(self, tokens: Tokens) -> Any:
        return read_expression(tokens, letters=self.letters).tree

    def sum(self) -> Any:
        total = self.product()
        while self.peek().text in ("+", "-") and self.peek().kind == "sign":
            sign = self.peek().text
            self.at += 1
            if self.peek().text in ("+", "-"):
                raise NotUnderstood(f"`{sign}{self.peek().text}` is no sign")
            term = self.product()
            total = Add(total, term if sign == "+" else _negative(term), evaluate=False)
        return total

    def product(self) -> Any:
        value = self.factor()
        while True:
            text, kind = self.peek().text, self.peek().kind
            if kind in ("sign", "command") and text in (r"\cdot", "/"):
                self.at += 1
                right = self.factor()
                value = Mul(value, right if text != "/" else _inverse(right), evaluate=False)
            elif self.follows():
                value = Mul(value, self.power(), evaluate=False)
            else:
                return value

    def follows(self) -> bool:
        """Return whether what stands here is multiplied with what stands before."""
        token = self.peek()
        if not token.text or (token.kind in ("sign", "command") and token.text in _END):
            return False
        before = self.tokens[self.at - 1]
        grouped = token.text == "{" and self.peek(1).kind == "number"  # 3{2} is printed as 32
        if token.kind == "number" and token.text[0] != "." and (self.at == self.raised or before.text == "!"):
            return True
        if token.kind == "number" or grouped or (before.kind == "number" and before.text.endswith(".")):
            raise NotUnderstood(f"what `{written((before, token))}` is")
        return token.kind in ("letter", "word", "command", "sign")

    def factor(self) -> Any:
        token = self.peek()
        if token.kind == "sign" and token.text in ("+", "-"):
            self.at += 1
            if self.peek().text in ("+", "-"):
                raise NotUnderstood(f"`{token.text}{self.peek().text}` is no sign")
            value = self.factor()
            return _negative(value) if token.text == "-" else value
        return self.power()

    def power(self) -> Any:
        base = self.atom()
        factorials = 0
        while self.peek().kind == "sign" and self.peek().text == "!":
            self.at += 1
            factorials += 1
            base = sympy.factorial(base, evaluate=False)
        if factorials > 1:
            raise NotUnderstood("`!!` is a double factorial or two factorials")
        if self.peek().text != "^":
            return base
        self.at += 1
        if self.peek().text == r"\circ" or [t.text for t in self.tokens[self.at : self.at + 3]] == [
            "{",
            r"\circ",
            "}",
        ]:
            self.at += 1 if self.peek().text == r"\circ" else 3
            return Mul(base, sympy.pi, Rational(1, 180), evaluate=False)
        braced = self.peek().text == "{"
        exponent = self.exponent()
        if self.peek().text == "^":
            raise NotUnderstood("an exponent after an exponent")
        if self.peek().kind == "sign" and self.peek().text == "!":
            raise NotUnderstood("of what `!` is the factorial")
        self.raised = self.at if braced else self.raised
        return Pow(base, exponent, evaluate=False)

    def exponent(self) -> Any:
        if self.peek().text == "-" and self.peek(1).kind in ("number", "letter"):
            self.at += 1
            return _negative(self.argument(whole=True))
        return self.argument(whole=True)

    def argument(self, *, whole: bool = False) -> Any:
        r"""Read what a command or `^` applies to: a group in braces, or one sign; one digit unless `whole`."""
        token = self.peek()
        if token.text == "{":
            return self.inner(self.group())
        if token.kind == "number":
            if not whole and len(token.text) > 1:
                raise NotUnderstood(f"how far a command before `{token.text}` reaches")
            self.at += 1
            return Rational(token.text)
        if token.text in ("(", "|") or token.kind in ("letter", "command"):
            return self.atom()
        raise NotUnderstood("an argument is missing" if not token.text else f"`{token.text}` as an argument")

    def group(self) -> Tokens:
        """Return what the bracket here holds, and pass it."""
        rest = self.tokens[self.at :]
        closing = outside(rest)[1]
        self.at += closing + 1
        return rest[1:closing]

    def atom(self) -> Any:
        token = self.peek()
        if token.kind == "number":
            return self.number()
        if token.kind == "letter":
            return self.letter()
        if token.kind == "word":
            return self.word()
        if token.text in ("(", "["):
            if (
                self.tokens[self.at + outside(self.tokens[self.at :])[1]].text
                != {"(": ")", "[": "]"}[token.text]
            ):
                raise NotUnderstood("brackets of two kinds")
            return self.inner(self.group())
        if token.text == "{":
            return self.inner(self.group())
        if token.text == "|":
            return self.absolute()
        if token.kind == "command":
            return self.command()
        raise NotUnderstood(
            "something is missing at the end" if not token.text else f"`{token.text}` is not understood"
        )

    def number(self) -> Any:
        text = self.peek().text
        self.at += 1
        fraction = self._digits_of_fraction()
        if fraction is None:
            return Rational(text)
        if "." in text or fraction[0] >= fraction[1]:
            raise NotUnderstood(f"whether `{text}` and a fraction are a mixed number or a product")
        self.at += fraction[2]
        return Rational(int(text) * fraction[1] + fraction[0], fraction[1])

    def _digits_of_fraction(self) -> tuple[int, int, int] | None:
        r"""Return numerator, denominator and length of a `\frac` of whole numbers that stands here."""
        if self.peek().text != r"\frac" or self.tokens[self.at - 2].text in ("^", "_"):
            return None
        text = "".join(token.text for token in self.tokens[self.at + 1 :])
        found = re.match(r"\{(\d+)\}\{(\d+)\}|(\d)(\d)(?!\d)|\{(\d+)\}(\d)(?!\d)|(\d)\{(\d+)\}", text)
        if found is None:
            return None
        above, below = (int(number) for number in found.groups() if number is not None)
        length = 1 + sum(1 for _ in re.finditer(r"[{}]", found[0])) + (1 if found[3] is not None else 2)
        return above, below, length

    def letter(self) -> Any:
        name = self.peek().text
        self.at += 1
        if name in _CONSTANTS and self.peek().text != "_":
            return _CONSTANTS[name]
        return Symbol(name + self.subscript())

    def subscript(self) -> str:
        text = ""
        while self.peek().kind == "sign" and self.peek().text == "'":
            self.at += 1
            text += "'"
        if self.peek().text != "_":
            return text
        self.at += 1
        if self.peek().text == "{":
            return text + "_" + written(self.group()).replace(" ", "")
        if self.peek().kind not in ("number", "letter", "word"):
            raise NotUnderstood("a subscript is missing")
        self.at += 1
        return text + "_" + self.tokens[self.at - 1].text

    def word(self) -> Any:
        token = self.peek()
        if token.marked or len(set(token.text)) < len(token.text):
            raise NotUnderstood(f"the text `{token.text}` is not understood")
        if self.letters is not None and not set(token.text) <= self.letters:
            raise NotUnderstood(f"`{token.text}` is no unit, and no product of the label's letters")
        self.at += 1
        return Mul(*(_CONSTANTS.get(c, Symbol(c)) for c in token.text), evaluate=False)

    def absolute(self) -> Any:
        rest = self.tokens[self.at + 1 :]
        closing = next((i for i in outside_or_empty(rest) if rest[i].text == "|"), None)
        if not closing:
            raise NotUnderstood("`|` never closes")
        self.at += closing + 2
        return Abs(self.inner(rest[:closing]), evaluate=False)

    def command(self) -> Any:
        name = self.peek().text
        if name in GREEK:
            self.at += 1
            return Symbol(name + self.subscript())
        if name in _CONSTANTS:
            self.at += 1
            return _CONSTANTS[name]
        if name in (r"\lfloor", r"\lceil"):
            rounded = sympy.floor if name == r"\lfloor" else sympy.ceiling
            return rounded(self.inner(self.group()), evaluate=False)
        self.at += 1
        if name in (r"\frac", r"\binom", r"\dbinom", r"\tbinom"):
            if self.peek().kind == "number" and re.fullmatch(r"\d\d", self.peek().text):
                above, below = map(Integer, self.peek().text)
                self.at += 1
            else:
                above, below = self.argument(), self.argument()
            return _quotient(above, below) if name == r"\frac" else _binomial(above, below)
        if name in _ROOTS:
            return self.root(name)
        if name in _TRIGONOMETRIC or name in _FUNCTIONS or name in _LOGARITHMS:
            return self.function(name)
        raise NotUnderstood(f"`{name}` is not understood")

    def root(self, name: str) -> Any:
        degree: Any = Integer(_ROOTS[name])
        if name == r"\sqrt" and self.peek().text == "[":
            degree = self.inner(self.group())
        return Pow(
            self.argument(whole=name != r"\sqrt" or self.letters is None), _inverse(degree), evaluate=False
        )

    def function(self, name: str) -> Any:
        apply: Callable[[Any], Any]
        power: Any = None
        if name in _LOGARITHMS:
            base: Any = Integer(10)
            if self.peek().text == "_":
                self.at += 1
                base = self.argument()
            apply = partial(_logarithm, base=base)
        else:
            kind = _TRIGONOMETRIC[name][0] if name in _TRIGONOMETRIC else _FUNCTIONS[name]
            apply = partial(kind, evaluate=False)
        if self.peek().text == "^":
            self.at += 1
            power = self.exponent()
            if power == -1 or str(power) == "-1":
                if name not in _TRIGONOMETRIC:
                    raise NotUnderstood(f"`{name}^{{-1}}` is an inverse or a reciprocal")
                inverse = _TRIGONOMETRIC[name][1]
                apply, power = partial(inverse, evaluate=False), None
        value = apply(self.operand())
        return value if power is None else Pow(value, power, evaluate=False)

    def operand(self) -> Any:
        r"""Read what a function without brackets is of: `2x` of `\sin 2x\cos x`."""
        if self.peek().text in ("(", "{", "["):
            token = self.peek()
            value = self.atom()
            return (
                Pow(value, self._power(), evaluate=False)
                if self.peek().text == "^" and token.text == "{"
                else value
            )
        if self.peek().text in ("+", "-"):
            sign = self.peek().text
            self.at += 1
            return _negative(self.operand()) if sign == "-" else self.operand()
        value = self.power()
        while self.peek().text not in ("(", "[", "{") and not self._is_function() and self.follows():
            value = Mul(value, self.power(), evaluate=False)
        while self.peek().text == "/":  # \sin x/2 is read by nobody in one way only
            raise NotUnderstood("how far a function without brackets reaches")
        return value

    def _power(self) -> Any:
        self.at += 1
        return self.exponent()

    def _is_function(self) -> bool:
        name = self.peek().text
        return name in _TRIGONOMETRIC or name in _FUNCTIONS or name in _LOGARITHMS


def outside_or_empty(tokens: Tokens) -> list[int]:
    """Return the places outside of brackets up to the first that closes what was opened before."""
    for end in range(len(tokens), 0, -1):
        try:
            return outside(tokens[:end])
        except NotUnderstood:
            continue
    return []


def _negative(x: Any) -> Any:
    return -x if isinstance(x, Rational) else Mul(Integer(-1), x, evaluate=False)


def _inverse(x: Any) -> Any:
    return Pow(x, Integer(-1), evaluate=False)


def _quotient(a: Any, b: Any) -> Any:
    return Mul(a, _inverse(b), evaluate=False)


def _binomial(a: Any, b: Any) -> Any:
    return sympy.binomial(a, b, evaluate=False)


def _logarithm(x: Any, base: Any) -> Any:
    return Mul(sympy.log(x, evaluate=False), _inverse(sympy.log(base, evaluate=False)), evaluate=False)
