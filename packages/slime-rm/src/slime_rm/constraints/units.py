"""Splitting text into the units that constraints count: words, sentences, paragraphs."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|\n+")
_ABBREVIATION = re.compile(r"(?:^|\s)(?:Mr|Mrs|Ms|Dr|Prof|St|vs|e\.g|i\.e|etc|[A-Z])\.$")
RELATIONS = {"at least": lambda n, limit: n >= limit, "less than": lambda n, limit: n < limit}


def words(text: str) -> list[str]:
    """Return the words: letters and digits, with hyphens and apostrophes inside."""
    return _WORD.findall(text)


def small_words(text: str) -> list[str]:
    """Return the words in small letters."""
    return [word.lower() for word in words(text)]


def sentences(text: str) -> list[str]:
    """Return the sentences: they end at `.`, `!`, `?` before a blank, not after an abbreviation, or with their line."""
    found: list[list[str]] = []
    joins = False
    for piece in _SENTENCE_END.split(text):
        if joins:
            found[-1].append(piece)
        elif words(piece):
            found.append([piece.strip()])
        joins = bool(found) and bool(_ABBREVIATION.search(found[-1][-1]))
    return [" ".join(pieces) for pieces in found]


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs: blocks between blank lines."""
    return [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]


def count_is(n: int, relation: str, limit: int) -> bool:
    """Return whether `n` relates to `limit`: `at least` or `less than`.

    Raises:
        ValueError: another relation.
    """
    if relation not in RELATIONS:
        raise ValueError(f"relation is {relation!r}; wanted one of {sorted(RELATIONS)}")
    return bool(RELATIONS[relation](n, limit))
