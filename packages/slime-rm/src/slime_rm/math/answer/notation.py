r"""One writing for answers that differ only in how they are typed: `\dfrac{1}{2}.` and `\frac{1}{2}`."""

from __future__ import annotations

import re
import unicodedata
from itertools import accumulate, groupby

_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\\,|\\ |~| )\d{3})+(?!\d|\s*/)")
_BRACED_THOUSANDS = re.compile(r"(?<![\d.,}])[1-9]\d{0,2}\{,\}\d{3}(?:(?:\{,\}|,)\d{3})*(?!\d|\{,\})")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,9})(?![\w.])")
_MIXED = re.compile(r"(?<![\w.^/])(\d+)(?:\s|\\[ ,;:]|~|\\text\s*\{\s*\})+(\d+)\s*/\s*(\d+)(?![\w.^])")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d)(?!\d*\\dot))")
_DOTTED = re.compile(r"(?<=[\d.])\\dot\s*(?:\{(\d)\}|(\d))(\d*)\\dot\s*(?:\{(\d)\}|(\d))")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_EMPHASIS = re.compile(r"^(\*\*|__)(.*)\1$", re.DOTALL)
_DOLLARS = re.compile(r"^(?:\$\$?|\\\(|\\\[)(.*?)(?:\$\$?|\\\)|\\\])$", re.DOTALL)
_BRACKET = re.compile(r"[{(\[]|[})\]]")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_PROSE = re.compile(r"[^\W\d_]{3,}(?:[\s,.'’-]+[^\W\d_]+)*\.?")

#: Unicode signs that have a LaTeX command; letters, digits and fractions follow from their Unicode descriptions.
_SIGNS = {
    **dict.fromkeys("−–—‒﹣", "-"),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("°˚º", r"^\circ "),
    **dict.fromkeys("≤⩽≦", r"\le "),
    **dict.fromkeys("≥⩾≧", r"\ge "),
    **dict.fromkeys("∅⌀", r"\emptyset "),
    **dict.fromkeys("。｡", "."),
    **dict.fromkeys("、", ","),
    **dict.fromkeys("∖⧵", r"\setminus "),
    **dict.fromkeys("∣∥", "|"),
    **dict.fromkeys("′’", "'"),
    "∶": ":",
    "×": r"\times ", "÷": r"\div ", "∕": "/", "⁄": "/", "√": r"\radical ", "∛": r"\cuberadical ",
    "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "≡": r"\equiv ", "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∠": r"\angle ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "％": r"\%", "﹪": r"\%", "＄": r"\$", "﹩": r"\$", "∧": r"\land ", "∨": r"\lor ",
}  # fmt: skip
_SCRIPTS = {"<super>": "^", "<sub>": "_"}

#: (pattern, replacement), in order: what changes how an answer looks and never what it means.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:\\text\s*\{\s*)?(?i:(?:the set of )?all real(?: number)?s)\s*\}?$", r"\\mathbb{R}"),
        (r"^(?:\\text\s*\{\s*)?(?i:(?:the )?empty set|no (?:real )?solutions?)\s*\}?\.?$", r"\\emptyset"),
        (r"\\(?:[dtc]|nice|s)frac(?![A-Za-z])", r"\\frac"),
        # A brace on the left of lines alone: a system of equations, or a definition by cases.
        (
            r"\\left\s*\\\{\s*\\begin\s*\{array\}(?:\s*\{[^{}]*\})?(.*)\\end\s*\{array\}\s*\\right\s*\.",
            r"\\begin{cases}\1\\end{cases}",
        ),
        (
            r"\\left\s*\\\{\s*(\\begin\s*\{(aligned|gathered|matrix)\}.*\\end\s*\{\2\})\s*\\right\s*\.",
            r"\1",
        ),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\big(cup|cap)(?![A-Za-z])", r"\\\1"),
        (r"\^\{(\d+)\}\s*/\s*_\{(\d+)\}", r"\\frac{\1}{\2}"),
        (r"^(?:\\text\s*\{\s*)?USD?\s*\}?\s*(?:\\?\$)?\s*(?=\d)", r"\\$"),
        (
            r"(?i)(?<=[\da-f])\s*(?:\\text\s*\{\s*)?\(?\s*(?:in )?base[\s-]*\}?\s*([1-9]\d?)\s*\)?\s*\}?\s*$",
            r"_{\1}",
        ),
        (r"\\(?:left|right|middle|[Bb]igg?[lrm]?)(?![A-Za-z])\s*", ""),
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE"
            r"|huge|Huge|bf|bfseries|it|itshape|rm|sf|tt|sl|em|boldmath|limits|nolimits|centering|mathstrut|strut"
            r"|nobreak|noindent|hfill|null)(?![A-Za-z])\s*",
            "",
        ),
        (
            r"\\(?:math(?:bf|it|sf|tt|cal|scr|frak|normal|ord)|boldsymbol|bm|pmb|underline|uline|ensuremath|boxed|fbox)"
            r"(?![A-Za-z])\s*",
            "",
        ),
        (r"\\fcolorbox\s*\{[^{}]*\}\s*(?=\{)", r"\\colorbox"),
        (r"\\(?:textcolor|colorbox|color)\s*(?:\[[^\[\]{}]*\])?\{[^{}]*\}\s*", ""),
        (r"\\\\\s*\[[^\[\]]*\d\s*(?:pt|mm|cm|em|ex|in)\]", r"\\\\"),
        (r"(?:\^\s*)?\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\not\s*(?==)", r"\\ne"),
        (r"\\ne=", r"\\ne "),
        (r"\^\s*\{?\\(?:text|mathrm)\{(st|nd|rd|th)\}\}?", r"\\text{\1}"),
        (r"\\text\{[.\s]*\}$", ""),
        (r"(\\text\{[^{}]*[^{}.])\.\s*\}$", r"\1}"),
        (r"\\[hv](?:space|skip)\*?\s*\{[^{}]*\}", " "),
        (r"\\(?:[hv]skip|m?kern)\s*-?[\d.]+\s*(?:pt|mm|cm|em|ex|in|mu)\b", " "),
        (r"^\s*\\(?:therefore|implies|Rightarrow|Longrightarrow|rightarrow)(?![A-Za-z])", ""),
        (r"\\(?:blacksquare|square|Box|qed|checkmark)\s*$", ""),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"(?<=\\mathbb\{[A-Z]\})\s*-\s*(?=\\\{)", r"\\setminus "),
        (r"^\s*([a-z])\s*\\in\s*\\mathbb\{R\}\s*[,;:]\s*(?=\1)", ""),
        (r"(?<!\\)\\(?:!|negthinspace(?![A-Za-z]))", ""),
        (r"\\(?:q?quad|enspace|thinspace|medspace|thickspace|space)(?![A-Za-z])|(?<!\\)\\[,;: \n]|~", " "),
        (r"(?<!\\)(?<![A-Za-z])\{([:;=<>])\}", r"\1"),
        (r"(?<=\d)\{\.\}(?=\d)", "."),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        # Greek letters of units, in the markup of text and behind it: micrometres, kilo-ohms.
        (r"(\\(?:text|mathrm)\s*\{\s*)\$?\\mu\s*\$?\s*(?=[A-Za-z])", r"\1μ"),
        (r"\\mu\s*(\\(?:text|mathrm)\s*\{)\s*(?=[A-Za-z]+\s*\})", r"\1μ"),
        (r"(\\(?:text|mathrm)\s*\{\s*[kMGmμ]?)\s*\$?\\Omega\s*\$?\s*\}", r"\1Ω}"),
        (
            r"((?:^|=)\s*[-+]?\d[\d.]*)\s+(?:\\(?:text|mathrm)\s*\{\s*([kMGm]?)\s*\}|([kMG]))?\s*\\Omega\s*$",
            r"\1\\text{\2\3Ω}",
        ),
        (r"(?<=[\d)\]}])[,;\s]*(?:\.\s*){2,}$", r"\\ldots"),  # it goes on
        (r"(?:\\\\|[.;,\s]|(?<!\\)\\$)+$", ""),
        (r"\s+", " "),
    )
)


def plain(answer: str) -> str:
    r"""Return `answer` in the one writing that equal answers share as often as text alone can tell.

    Unicode signs become LaTeX; fonts, sizes, colours, dollar signs, spacing commands and a full stop at the end
    go; `1\,000` becomes `1000`, `3{,}5` the decimal `3.5`, `1e3` a power of ten, `1 1/2` and `0.\overline{3}`
    fractions; the markup of fractions and brackets is spelt one way.
    """
    answer = _DOLLARS.sub(r"\1", _EMPHASIS.sub(r"\2", _ascii(answer).strip()).strip()).strip()
    for number in (_SPACED_THOUSANDS, _BRACED_THOUSANDS):
        answer = number.sub(lambda found: re.sub(r"\D", "", found[0]), answer)
    answer = _SCIENTIFIC.sub(lambda number: rf"{number[1]}\cdot10^{{{int(number[2])}}}", answer)
    answer = _MIXED.sub(r"\1\\frac{\2}{\3}", answer)
    answer = _DOTTED.sub(lambda dots: rf"\overline{{{''.join(filter(None, dots.groups()))}}}", answer)
    answer = _REPEATING.sub(_as_fraction, answer)
    for pattern, replacement in _RULES:
        answer = pattern.sub(replacement, answer)
    return answer.strip()


def same_writing(one: str, other: str) -> bool:
    """Return whether two answers in plain writing are the same but for blanks that part no digits, and text markup."""
    return _unmarked(one) == _unmarked(other)


def words(answer: str) -> str | None:
    r"""Return an answer that is words, in small letters, without markup and blanks; None for mathematics.

    Words are what `\text{...}` holds when nothing else stands around it and no digit in it, a choice such as
    `(B)`, and plain text that begins with a run of three letters. As mathematics `cat` is c·a·t, and so is `act`.
    """
    text = _TEXT.sub(r"\1", answer).strip()
    if choice := _CHOICE.fullmatch(text):
        return choice[1].lower()
    if _PROSE.fullmatch(text) or (_TEXT.fullmatch(answer.strip()) and not re.search(r"\d", text)):
        return _without_blanks(text).rstrip(".").lower()
    return None


def same_words(label: str, answer: str) -> bool | None:
    """Return whether label and answer are the same words; None where one is mathematics.

    The case of letters is left out, but for a label that is a small letter alone: `r` is a variable, and `R` another one.
    """
    wanted, given = words(label), words(answer)
    if wanted is None or given is None:
        return None
    is_variable = len(label) == 1 and label.islower()
    return wanted == given and not (is_variable and label not in _TEXT.sub(r"\1", answer))


def depth(answer: str) -> int:
    """Return how deep brackets nest in `answer`."""
    levels = accumulate(1 if bracket[0] in "{([" else -1 for bracket in _BRACKET.finditer(answer))
    return max(levels, default=0)


def _unmarked(answer: str) -> str:
    return _without_blanks(_TEXT.sub(r"\1", answer))


def _without_blanks(text: str) -> str:
    # Between two digits a blank is not how a number is typed, but what parts two numbers.
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _as_fraction(number: re.Match[str]) -> str:
    """Write a.b(c), with c repeating for ever, as (abc − ab) / (10^|b| · (10^|c| − 1))."""
    whole, fixed = number[1], number[2]
    repeated = number[3] or number[4]
    numerator = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"


def _ascii(text: str) -> str:
    """Write Unicode signs in LaTeX: `½`, `x²`, `√`, Greek, full-width and mathematical letters."""
    if text.isascii():
        return text
    # A run of raised signs is one exponent: x²³.
    runs = groupby(text, key=_script)
    return "".join(
        "".join(_SIGNS.get(c) or _letter_or_fraction(c) for c in run)
        if script is None
        else f"{script}{{{unicodedata.normalize('NFKC', ''.join(run)).replace('−', '-')}}}"
        for script, run in runs
    )


def _script(c: str) -> str | None:
    """Return `^` or `_` for a raised or lowered character."""
    return None if c in _SIGNS else _SCRIPTS.get(unicodedata.decomposition(c).partition(" ")[0])


def _letter_or_fraction(c: str) -> str:
    if c.isascii() or unicodedata.category(c) == "Cf":
        return c if c.isascii() else ""
    kind = unicodedata.decomposition(c).partition(" ")[0]
    if kind == "<fraction>":
        above, _, below = unicodedata.normalize("NFKC", c).partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    name = unicodedata.name(c, "").split(" ")
    if name[:1] == ["GREEK"] and name[2:3] == ["LETTER"] and len(name) == 4:
        letter = name[3].lower()
        return "\\" + (letter if name[1] == "SMALL" else letter.capitalize()) + " "
    normal = unicodedata.normalize("NFKC", c)
    return normal if normal == c or len(normal) > 3 else "".join(_SIGNS.get(n, n) for n in normal)
