r"""The signs that an answer in plain writing is made of, and what brackets hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from slime_rm.math.answer.units import is_unit_word

Kind = Literal["number", "letter", "word", "command", "sign", "begin", "end"]


class NotUnderstood(Exception):
    """An answer cannot be read; the message says what of it."""


@dataclass(frozen=True)
class Token:
    r"""One sign of an answer.

    Attributes:
        kind: `word` is what stands in `\text` or is a run of letters that is no product at first sight; `sign` is
            a single character such as `+` or `(`; `begin` and `end` are an environment's.
        text: what stands there; of a command its name with the backslash, of an environment its name.
        spaced: whether a blank stands before it.
        marked: whether it stands in `\text` or the like.
    """

    kind: Kind
    text: str
    spaced: bool = False
    marked: bool = False


Tokens = tuple[Token, ...]

FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "ln",
        "log",
        "lg",
        "exp",
        "sqrt",
        "pi",
        "mod",
        "gcd",
        "lcm",
        "det",
    ]
)
"""Names of plain letters that mean what the command of the same name means."""
JOINING = frozenset(["or", "and", "to"])

_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|sc|up|md)?|mathrm|emph|mbox|hbox|operatorname\*?)(?![A-Za-z])\s*"
)
_SIGN = re.compile(
    r"""(?P<blank>\s+)
    |\\begin\s*\{(?P<begin>[A-Za-z]+)\*?\}(?:(?<=array\})\s*\{[^{}]*\})?
    |\\end\s*\{(?P<end>[A-Za-z]+)\*?\}
    |(?P<command>\\mathbb\{[A-Z]\}|\\[A-Za-z]+|\\.)
    |(?P<number>\d+(?:\.\d*)?|\.\d+)
    |(?P<letters>[^\W\d_]+)
    |(?P<sign><=|>=|!=|:=|==|\*\*|.)""",
    re.VERBOSE | re.DOTALL,
)
_HALF_OF_DAY = re.compile(r"(?i)(?<![a-z])([ap])\.\s?m\.?(?![a-z])")
_SPELT = {
    r"\leq": r"\le", r"\leqslant": r"\le", "<=": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", ">=": r"\ge",
    r"\neq": r"\ne", "!=": r"\ne", r"\lt": "<", r"\gt": ">", r"\times": r"\cdot", "*": r"\cdot", "**": "^", r"\ast": r"\cdot",
    r"\div": "/", r"\lor": "or", r"\vee": "or", r"\land": "and", r"\wedge": "and", r"\lbrace": r"\{",
    r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\vert": "|", r"\mid": "|", r"\lvert": "|", r"\rvert": "|",
    r"\colon": ":", r"\simeq": r"\approx", r"\doteq": r"\approx", r"\degree": r"\circ", r"\to": r"\to",
    r"\backslash": r"\setminus", r"\smallsetminus": r"\setminus", "==": "=", ":=": "=", r"\%": "%", r"\$": "$",
    r"\euro": "€", r"\pounds": "£", r"\yen": "¥", r"\imath": "i", r"\bmod": r"\mod", r"\cent": "¢", r"\coloneqq": "=",
}  # fmt: skip
OPENING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}  # fmt: skip
_CLOSING = frozenset(OPENING.values())


def tokenize(answer: str) -> Tokens:
    r"""Return the signs of `answer`, which is in the writing of `notation.plain`.

    Raises:
        NotUnderstood: a brace of `\text` never closes.
    """
    return tuple(_thousands(list(_tokens(answer, marked=False))))


def _tokens(text: str, *, marked: bool) -> Iterator[Token]:
    text = _HALF_OF_DAY.sub(r"\1m", text)
    at, spaced = 0, False
    while at < len(text):
        if opening := _TEXT_COMMAND.match(text, at):
            inside, at = _group(text, opening.end())
            is_text = not (opening[0].startswith(r"\operatorname") and inside in FUNCTIONS)
            yield from _spaced(list(_tokens(inside, marked=is_text)), spaced)
            spaced = False
            continue
        found = _SIGN.match(text, at)
        assert found is not None  # the last alternative takes any character
        at = found.end()
        if found["blank"] or (marked and found[0] == "$"):
            spaced = True
            continue
        yield from _of_match(found, spaced=spaced, marked=marked)
        spaced = False


def _spaced(tokens: list[Token], spaced: bool) -> list[Token]:
    if tokens and spaced:
        first = tokens[0]
        tokens[0] = Token(first.kind, first.text, True, first.marked)
    return tokens


def _of_match(found: re.Match[str], *, spaced: bool, marked: bool) -> Iterator[Token]:
    kinds: tuple[Kind, ...] = ("begin", "end", "number")
    for kind in kinds:
        if found[kind] is not None:
            yield Token(kind, found[kind], spaced, marked)
            return
    if found["letters"] is None:
        text = _SPELT.get(found[0], found[0])
        sort: Kind = "word" if text in JOINING else "command" if text[0] == "\\" and len(text) > 1 else "sign"
        yield Token(sort, text, spaced, marked)
        return
    letters = found["letters"]
    if letters in FUNCTIONS and not (marked and letters == "sec"):
        yield Token("command", "\\" + letters, spaced, marked)
    elif letters in JOINING or _is_word(letters, marked):
        yield Token("word", letters, spaced, marked)
    else:
        yield from (Token("letter", c, spaced and i == 0, marked) for i, c in enumerate(letters))


def _is_word(letters: str, marked: bool) -> bool:
    """Return whether a run of letters is a word: a unit, or long enough to be no product at first sight."""
    if len(letters) == 1:
        return marked and is_unit_word(letters)
    return len(letters) > 2 or marked or is_unit_word(letters, marked=False)


def _group(text: str, start: int) -> tuple[str, int]:
    """Return what the brace at `start` holds, or the one character there, and where it ends."""
    if not text.startswith("{", start):
        return text[start : start + 1], start + 1
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : start + brace.start()], start + brace.end()
    raise NotUnderstood("a brace never closes")


def _thousands(tokens: list[Token]) -> list[Token]:
    """Join `1,000` to one number: outside of brackets, and within where other commas have blanks after them."""
    depth, depths = 0, []
    for token in tokens:
        depth -= token.text in _CLOSING and token.kind in ("sign", "command")
        depths.append(depth)
        depth += token.text in OPENING and token.kind in ("sign", "command")
    parting = {
        depths[i]
        for i, (comma, after) in enumerate(pairwise(tokens))
        if comma.text in (",", ";") and (after.spaced or comma.text == ";")
    }
    joined: list[Token] = []
    for i, token in enumerate(tokens):
        before = tokens[i - 2] if i > 1 else None
        if (
            before is not None
            and tokens[i - 1].text == ","
            and not (tokens[i - 1].spaced or token.spaced)
            and token.kind == before.kind == "number"
            and re.fullmatch(r"\d{3}(?:\.\d*)?", token.text)
            and (len(before.text) == 3 or joined[-2].text == before.text)
            and re.fullmatch(r"[1-9]\d{0,2}" if joined[-2].text == before.text else r"\d+", joined[-2].text)
            and (depths[i] == 0 or depths[i] in parting)
        ):
            joined[-2:] = [Token("number", joined[-2].text + token.text, joined[-2].spaced, token.marked)]
        else:
            joined.append(token)
    return joined


def split(tokens: Tokens, *parting: str) -> list[tuple[Token | None, Tokens]]:
    """Return the parts of `tokens` between signs in `parting` outside of all brackets, each with the sign before it.

    Raises:
        NotUnderstood: brackets do not match.
    """
    parts: list[tuple[Token | None, Tokens]] = []
    before: Token | None = None
    start = 0
    for i in outside(tokens):
        if tokens[i].text in parting and tokens[i].kind in ("sign", "command", "word"):
            parts.append((before, tokens[start:i]))
            before, start = tokens[i], i + 1
    parts.append((before, tokens[start:]))
    return parts


def outside(tokens: Tokens) -> list[int]:
    """Return the places of `tokens` outside of all brackets and environments, opening and closing ones included.

    A closing bracket may be of another kind than the opening one, as in `[0,1)`; braces and environments match.

    Raises:
        NotUnderstood: brackets do not match.
    """
    places: list[int] = []
    open_ones: list[Token] = []
    for i, token in enumerate(tokens):
        if closes(token):
            if not open_ones or not _match(open_ones.pop(), token):
                raise NotUnderstood(f"`{token.text}` closes nothing")
            if not open_ones:
                places.append(i)
        elif opens(token):
            if not open_ones:
                places.append(i)
            open_ones.append(token)
        elif not open_ones:
            places.append(i)
    if open_ones:
        raise NotUnderstood(f"`{open_ones[-1].text}` never closes")
    return places


def opens(token: Token) -> bool:
    """Return whether `token` opens a bracket or an environment."""
    return token.kind == "begin" or (token.kind in ("sign", "command") and token.text in OPENING)


def closes(token: Token) -> bool:
    """Return whether `token` closes a bracket or an environment."""
    return token.kind == "end" or (token.kind in ("sign", "command") and token.text in _CLOSING)


def _match(opening: Token, closing: Token) -> bool:
    if opening.kind == "begin":
        return closing.kind == "end" and opening.text == closing.text
    if opening.text in "([":
        return closing.text in (")", "]")
    return closing.kind != "end" and OPENING[opening.text] == closing.text


def wraps(tokens: Tokens) -> bool:
    """Return whether the first sign of `tokens` opens what the last one closes."""
    return len(tokens) > 1 and opens(tokens[0]) and outside(tokens) == [0, len(tokens) - 1]


def unwrapped(tokens: Tokens) -> Tokens:
    """Return `tokens` without braces around all of them."""
    while tokens and tokens[0].text == "{" and wraps(tokens):
        tokens = tokens[1:-1]
    return tokens


def written(tokens: Tokens) -> str:
    """Return `tokens` as text, for messages."""
    return "".join((" " if token.spaced else "") + token.text for token in tokens).strip()
