"""Names that may stand before the `=` of a value and ask for no value themselves. Importing this takes seconds."""

from __future__ import annotations

import re

from slime_rm.math.answer.expression import GREEK
from slime_rm.math.answer.tokens import Tokens, outside, split, unwrapped, wraps

_DENIALS = frozenset(
    [
        "not",
        "no",
        "wrong",
        "never",
        "maybe",
        "false",
        "incorrect",
        "except",
        "unless",
        "perhaps",
        "possibly",
        "isn",
        "if",
    ]
)
#: Stand in a name, and name nothing themselves.
_MARKS = frozenset(
    [
        "'",
        "{",
        "}",
        r"\angle",
        r"\triangle",
        r"\overline",
        r"\overrightarrow",
        r"\vec",
        r"\hat",
        r"\bar",
        r"\det",
    ]
)
_DERIVATIVE = re.compile(r"\\frac\{d(?:\^\{?2\}?)?[a-z]\}\{d[a-z](?:\^\{?2\}?)?\}")


def is_name(tokens: Tokens) -> bool:
    r"""Return whether `tokens` name something: `x`, `a_1`, `f(x)`, `AB`, `\angle ABC`, `|AB|`, `P(A)`, `dy/dx`."""
    tokens = unwrapped(tokens)
    if not tokens:
        return False
    if len(tokens) > 2 and (wraps(tokens) or tokens[0].text == tokens[-1].text == "|"):
        inside = split(tokens[1:-1], ",") if tokens[0].text in "(|[" else []
        return bool(inside) and all(_is_plain_name(part) for _, part in inside)
    places = outside(tokens)
    if len(places) > 2 and tokens[places[-1]].text == ")" and tokens[places[-2]].text == "(":
        function = tokens[: places[-2]]
        if [token.text for token in function[-5:]] == ["^", "{", "-", "1", "}"]:
            function = function[:-5]
        return bool(function) and _is_plain_name(function, function=True)
    if len(tokens) > 2 and (tokens[0].text, tokens[1].text) == ("m", r"\angle"):
        tokens = tokens[1:]
    terms = split(tokens, ":")
    if len(terms) > 1:
        return all(_is_plain_name(term) for _, term in terms)
    if _DERIVATIVE.fullmatch("".join(token.text for token in tokens)):
        return True
    return _is_plain_name(tokens)


def _is_plain_name(tokens: Tokens, *, function: bool = False) -> bool:
    subscript = next((i for i, token in enumerate(tokens) if token.text == "_"), len(tokens))
    behind = tokens[subscript + 1 :]
    if behind and not (len(behind) == 1 or wraps(behind)):
        return False
    stem = [t for t in tokens[:subscript] if t.text not in _MARKS or (function and t.text == r"\det")]
    if function and [token.text for token in stem] in ([r"\gcd"], [r"\lcm"], [r"\det"]):
        return True
    if not stem or (stem[0].text in ("e", "i") and stem[0].kind == "letter" and len(stem) == 1):
        return False
    if all(token.kind == "word" for token in stem):
        return all(t.text.isalpha() and t.text.lower() not in _DENIALS for t in stem) and (
            stem[0].marked or stem[0].text.isupper() or len(stem[0].text) > 2
        )
    if len(stem) == 1:
        return stem[0].kind == "letter" or stem[0].text in GREEK
    return all(token.kind == "letter" and token.text.isupper() for token in stem) and not function
