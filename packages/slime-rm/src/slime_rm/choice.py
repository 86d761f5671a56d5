"""Reading the option that a response chooses: one letter, or none."""

from __future__ import annotations

import re

from slime_rm.boxed import last_boxed

_BOX_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*|[{}()\[\]$*\s.:]")
_ANSWER = re.compile(r"\b(?:answer|choice|option)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n\s*\n")
_JOINED = re.compile(r"[)\].*_]*\s*(?:or|and|/|,|&)\s*[(\[*_]*([A-Z])(?![A-Za-z'’])")
_EMPHASIS = re.compile(r"[*_`]+")
_AFTER_OPTION = "or and because since as is but not which where while given due for from with"
TAIL_CHARACTERS = 2000
"""Where a choice is looked for: this many characters at the end."""


def chosen_letter(response: str, letters: str) -> str | None:
    r"""Return the letter of `letters` that the response decides for; None when it decides for none, or for several.

    In this order: the last `\boxed{...}`; what follows the last "answer", "choice" or "option" in its sentence; the
    last line, when it is one option; the last letter that stands by itself. `A` before a word in small letters is
    an article and `I` a pronoun, not an option, unless in brackets or before such as "or" and "because".
    """
    text = _EMPHASIS.sub("", response[-TAIL_CHARACTERS:])
    boxed = last_boxed(text)
    if boxed is not None:
        content = _BOX_MARKUP.sub("", boxed)
        return content if len(content) == 1 and content in letters else None
    option = _option(letters)
    for found in reversed(list(_ANSWER.finditer(text))):
        rest = text[found.end() :]
        end = _SENTENCE_END.search(_stem(rest))
        sentence = rest[: end.start() + 1] if end is not None else rest
        match = option.search(sentence)
        if match is not None:
            return None if _hedges(sentence, match, letters) else _letter(match)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
        alone = re.fullmatch(rf"[(\[]?([{letters}])(?:[)\].:]+.*|[)\].:]*)", lines[-1])
        if alone is not None:
            return alone[1]
    matches = list(option.finditer(text))
    if not matches or _hedges(text, matches[-1], letters):
        return None
    before = text[: matches[-1].start()]
    if re.search(rf"(?<![A-Za-z])[{letters}][)\].]*\s*(?:or|and|/|,|&)\s*[(\[]?$", before):
        return None
    return _letter(matches[-1])


def _option(letters: str) -> re.Pattern[str]:
    """Match a letter in brackets, or by itself and neither an article nor a pronoun."""
    words = "".join(letter for letter in "AI" if letter in letters)
    plain = "".join(letter for letter in letters if letter not in "AI")
    bare = [rf"[{plain}](?![A-Za-z0-9'’-])"] if plain else []
    after = "|".join(_AFTER_OPTION.split())
    bare += [rf"[{words}](?![A-Za-z0-9'’-])(?!\s+(?!(?:{after})\b)[a-z])"] if words else []
    return re.compile(rf"[(\[]([{letters}])[)\]]|(?<![A-Za-z0-9'’-])({'|'.join(bare)})")


def _letter(match: re.Match[str]) -> str:
    return str(match[1] or match[2])


def _stem(rest: str) -> str:
    """Blank out the full stop of a bare option (`A. Paris`), which ends no sentence."""
    return re.sub(r"(?<=\b[A-Z])\.(?=\s)", " ", rest)


def _hedges(text: str, match: re.Match[str], letters: str) -> bool:
    joined = _JOINED.match(text, match.end())
    return joined is not None and joined[1] in letters and joined[1] != _letter(match)
