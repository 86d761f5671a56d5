r"""One writing for answers that differ only in how they are typed: `\dfrac{1}{2}.` and `\frac{1}{2}`."""

from __future__ import annotations

import re

_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\\,|\\ |~| )\d{3})+(?!\d|\s*/)")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,9})(?![\w.])")
_MIXED = re.compile(r"(?<![\w.^/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.^])")
_REPEATING = re.compile(r"(?<!\d)(\d+)\.(\d*)\\overline\{(\d+)\}")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_DOLLARS = re.compile(r"^(?:\$\$?|\\\(|\\\[)(.*?)(?:\$\$?|\\\)|\\\])$", re.DOTALL)
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_PROSE = re.compile(r"[^\W\d_]{3,}(?:[\s,.'’-]+[^\W\d_]+)*\.?")

#: (pattern, replacement), in order: what changes how an answer looks and never what it means.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:left|right|displaystyle|[Bb]ig[lr]?)(?![A-Za-z])\s*", ""),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
        (r"\\!", ""),
        (r"\\q?quad(?![A-Za-z])|\\[,;:]", " "),
        (r"(?:\\\\|[.;,\s])+$", ""),
        (r"\s+", " "),
    )
)


def plain(answer: str) -> str:
    r"""Return `answer` in the one writing that equal answers share as often as text alone can tell.

    `1\,000` becomes `1000`, `1e3` a power of ten, `1 1/2` and `0.\overline{3}` fractions; dollar signs, spacing
    commands and a full stop at the end go; the markup of fractions and brackets is spelt one way.
    """
    answer = _DOLLARS.sub(r"\1", answer.strip()).strip()
    answer = _SPACED_THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), answer)
    answer = _SCIENTIFIC.sub(lambda number: rf"{number[1]}\cdot10^{{{int(number[2])}}}", answer)
    answer = _MIXED.sub(r"\1\\frac{\2}{\3}", answer)
    answer = _REPEATING.sub(_as_fraction, answer)
    for pattern, replacement in _RULES:
        answer = pattern.sub(replacement, answer)
    return answer.strip()


def same_writing(one: str, other: str) -> bool:
    """Return whether two answers in plain writing are the same but for blanks that part no digits."""
    return _without_blanks(one) == _without_blanks(other)


def words(answer: str) -> str | None:
    r"""Return an answer that is words, in small letters, without markup and blanks; None for mathematics.

    Words are what `\text{...}` holds when nothing else stands around it, a choice such as `(B)`, and plain text
    that begins with a run of three letters. sympy would read `cat` as c·a·t, which equals a·c·t.
    """
    text = _TEXT.sub(r"\1", answer).strip()
    if choice := _CHOICE.fullmatch(text):
        return choice[1].lower()
    if _PROSE.fullmatch(text) or _TEXT.fullmatch(answer.strip()):
        return _without_blanks(text).rstrip(".").lower()
    return None


def _without_blanks(text: str) -> str:
    # Between two digits a blank is not how a number is typed, but what parts two numbers.
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _as_fraction(number: re.Match[str]) -> str:
    """Write a.b(c), with c repeating for ever, as (abc − ab) / (10^|b| · (10^|c| − 1))."""
    whole, fixed, repeated = number.groups()
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"
