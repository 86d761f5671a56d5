r"""A response in the plain writing in which options are looked for: no markup, each box and option text one mark."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from slime_core.rewards.ending import without_special_tokens

from slime_rm.choice.chinese import in_english

TAIL_CHARACTERS = 2000
"""Where a choice is looked for: this many characters at the end."""
BOX = "⟦", "⟧"
"""What stands around the content of a box in plain writing."""
TEXT = "⟪", "⟫"
"""What stands around the letter of an option whose text the response writes."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#: Letters in circles, squares and flags become letters in brackets; NFKC does the rest (`Ｂ`, `𝐁`, `⒝`).
_ENCLOSED = {
    first + i: f"({letter})"
    for first, letters in (
        (0x24B6, _LETTERS),
        (0x24D0, _LETTERS.lower()),
        (0x1F130, _LETTERS),
        (0x1F150, _LETTERS),
        (0x1F170, _LETTERS),
        (0x1F1E6, _LETTERS),
    )
    for i, letter in enumerate(letters)
} | {0xFE0F: None, 0x200B: None, 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}
_NO_MARKS = str.maketrans("", "", "".join(BOX + TEXT))

_STRUCK = re.compile(
    r"~~.*?~~|<(s|del|strike)>.*?</\1>|\\(?:sout|cancel|xcancel|bcancel|st)\s*\{[^{}]*\}",
    re.DOTALL | re.IGNORECASE,
)
_STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|mathcal|mathbb|mbox"
    r"|bf|rm|it|bm|boldsymbol|pmb|emph|underline|large|Large|LARGE|huge|Huge|displaystyle|bold|operatorname|fbox"
    r"|color\s*\{\w+\}|textcolor\s*\{\w+\})(?![A-Za-z])\s*"
)
#: (pattern, replacement), in order: what changes how a choice looks and never which it is.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"(?<!\w)'([A-Za-z])'(?!\w)", r'"\1"'),
        (r"<(?:answer|final_answer)>\s*", "\nAnswer: "),
        (r"</?[a-z]+(?:\s[^<>]*)?/?>", " "),
        (r"(?<!\S)~(?=[A-Z](?!\w))", " not "),
        (r"\\(?:q?quad(?![a-z])|[,;:!> ])|(?<!\\)~", " "),
        (r"\\[()\[\]]|\$", ""),
        (r"\\(?:left|right|bigl?|bigr)(?![a-z])", ""),
        (r"\\(?:(?:long)?rightarrow|to|implies)(?![a-z])", "→"),
        (r"\\(?:[lv]or|vee|oplus)(?![a-z])|[∨⊕⊻]", " or "),
        (r"\\mid(?![a-z])", "|"),
        (r"[、，]", ", "),
        (r"\\(?:[lw]and|wedge|cup|cap|&)(?![a-z])|\\&|∧", " and "),
        (r"(?<!\w)[*_`]+|[*_`]+(?!\w)", ""),
        (r"^[ \t]*(?:#+|[-•>·–—])[ \t]+", ""),
        (r"[ \t\u00a0]+", " "),
    )
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ARTICLE = re.compile(r"\A(?:a|an|the)\s+", re.IGNORECASE)


def plain_response(response: str) -> str:
    r"""Return the end of what follows the thought (`</think>`) in plain writing, its boxes between `BOX` marks.

    What is struck out (`~~A~~`) goes. A last box that never closes, as in a truncated response, becomes an empty one.
    """
    solution = without_special_tokens(response.rpartition("</think>")[2])
    text = plain(_with_boxes(solution[-TAIL_CHARACTERS:].translate(_NO_MARKS)))
    return in_english(text)


def plain(text: str) -> str:
    """Return text without the markup of Markdown, HTML and LaTeX, its letters and signs in their usual forms."""
    text = unicodedata.normalize("NFKC", text.translate(_ENCLOSED))
    text = _STRUCK.sub(" ", text)
    text = _STYLE.sub("", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.replace("{", "").replace("}", "").strip()


def with_marked_texts(text: str, texts: Mapping[str, str]) -> str:
    """Return plain text in which the texts of options, by letter, are replaced by their letters between `TEXT` marks.

    Longer texts go first; a text is found as a whole, not inside a word or number, whatever its case and blanks. Texts
    of one letter, of no word, and those that two options share are not looked for.
    """
    wanted = {letter: _ARTICLE.sub("", plain(option).strip(" .;")) for letter, option in texts.items()}
    folded = [" ".join(option.lower().split()) for option in wanted.values()]
    for letter, option in sorted(wanted.items(), key=lambda entry: -len(entry[1])):
        words = option.split()
        if (
            not re.search(r"\w", option)
            or re.fullmatch(r"[^\W\d]", option)
            or list(wanted.values()).count(option) > 1
        ):
            continue
        case = re.IGNORECASE if folded.count(" ".join(words).lower()) == 1 else re.NOFLAG
        pattern = r"\s+".join(map(re.escape, words))
        found = re.compile(rf"(?<![\w⟪.,+−^/\\-]){pattern}(?![\w⟫^/\\])(?![.,]\d)", case)
        text = found.sub(f"{TEXT[0]}{letter}{TEXT[1]}", text)
    return text


def _with_boxes(text: str) -> str:
    r"""Put the contents of `\boxed{...}` between marks; the text ends where one never closes."""
    parts, end = [], 0
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue
        parts.append(text[end : box.start()])
        if text.startswith("{", box.end()):
            close = _closing(text, box.end())
            content, end = (
                ("", len(text)) if close is None else (text[box.end() + 1 : close], (close or 0) + 1)
            )
        else:
            bare = re.compile(r"[^\s$]*").match(text, box.end())
            content, end = (bare[0], bare.end()) if bare is not None else ("", box.end())
        parts.append(f" {BOX[0]}{_BOX.sub('', content)}{BOX[1]} ")
    return "".join([*parts, text[end:]])


def _closing(text: str, start: int) -> int | None:
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None
