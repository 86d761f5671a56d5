"""Whether the words around an answer in running text take it back, leave it open or make another of it."""

from __future__ import annotations

import re

from slime_rm.math.number_text import changes_number, leaves_number
from slime_rm.text.last_match import last_match

_BEFORE_CHARACTERS = 80
_BEFORE = re.compile(
    r"(?:\b(?:not|never|isn't|isn’t|neither|nor|or|and/or|either|between|about|around|approximately|approx|roughly|nearly|almost"
    r"|maybe|perhaps|possibly|probably|likely|at least|at most|up to|less than|more than|fewer than|greater than|over|under"
    r"|above|below|than|unlike|(?:anything|all|nothing) but|(?:could|may|might|would have|could have) be(?:en)?|(?:refuse|decline|hesitate)\w* to \w+|cannot be|can't be|can’t be|none of|half(?: of)?|twice|double|triple|minus|plus|times|negative"
    r"|(?:square|cube|root|percent|factorial|reciprocal|multiple|factor|power) of|were|except|instead of|rather than|n't)"
    r"|\b(?:wrong|incorrect|false|mistaken)(?:\s+\w+){0,3}|\b(?:suppose|assum(?:e|ing)|imagine)\b[^.,;\n]*"
    r"|\bbetween\b.*\band|\d\W{0,4}(?:to|through|till|until|and|&)|\d\W{0,4}[,;/]|[≠≈~<>≤≥±∓])"
    r"(?:\s+(?:be|equal to|equals|the|answer|value|number|is|was|exactly|either))*[\s*_`$({\[:\"'“\\]*\Z",
    re.IGNORECASE | re.DOTALL,
)
_HARMLESS = re.compile(r"(?:is|was|and|but|in|of)\b", re.IGNORECASE)
_AFTER = re.compile(
    r"(?:is|was|isn't|isn’t|wasn't|would be|seems?|looks?)\s+(?:(?:also|still|just|only|clearly|probably|likely)\s+)?(?:not|wrong|incorrect|false"
    r"|about|approximately|roughly|nearly|off|a\s+guess|no(?:t)?\b|too\b)|isn|wasn|give\s+or\s+take|[-–—]+\s*(?:no|not|nope|wrong|incorrect|maybe|perhaps|wait)\b|and\s+(?:a|one|an)\s+\w+|to\s+\W?\d"
    r"|\.\s?\.|…|\?|[±∓≠≈_^]|\\(?:[a-z]?dots|pm|mp|ne|neq|approx|sim|times|cdot|div|to|pmod|bmod|pi|sqrt)(?![a-z])",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|scratch\s+that|never\s?mind|strike\s+that|correction|actually|nope|oops|whoops|sorry|mistake|typo|miscalculated"
    r"|contradict\w*|impossible|low\s+confidence|not\s+(?:sure|confident|certain)|unsure|just\s+a\s+guess|(?:is|was|that's|that’s|it's|it’s)\s+(?:wrong|incorrect|false|not\s+(?:right|correct|true|it))"
    r"|(?:let\s+me|i)\s+(?:re-?check|re-?calculate|re-?consider|re-?do|correct)|on\s+second\s+thou?ght)\b|\bno(?=[,.!])",
    re.IGNORECASE,
)
#: Where the library writes the answer in another way than the text, it is the last of these.
_FORMULA = re.compile(r"\$[^$]+\$|\\\([^()]*\\\)|\\\[[^\[\]]*\\\]|\d[\d.,/]*")
_LETTERS = re.compile(r"-?[^\W\d_]+")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mbox|quad|,|;|\)|\]|\s)|[\s*`${}()\[\]\"'”,]")


def hedge(text: str, answer: str) -> str | None:
    """Return what words around the last mention of `answer` in `text` do to it; None where they leave it as it is."""
    written = re.compile(rf"(?<![\w.])(?<!\d,){re.escape(answer)}(?!\d|[.,]\d)")
    mention = last_match(written, text) or last_match(_FORMULA, text)
    if mention is None:
        return None
    before = _BEFORE.search(text[max(0, mention.start() - _BEFORE_CHARACTERS) : mention.start()])
    if before is not None:
        return f"`{before[0].strip()}` stands before the answer"
    behind = text[mention.end() :]
    glued = _LETTERS.match(behind)
    if glued is not None and not leaves_number(glued[0]):
        return f"`{glued[0][:30]}` stands behind the answer"
    first = _first_words(behind[:100])
    if _AFTER.match(first) or (changes_number(first) and not _HARMLESS.match(first)):
        return f"`{first[:30].strip()}` stands behind the answer"
    return taken_back(behind)


def taken_back(later: str) -> str | None:
    """Return what words of a text behind an answer take it back; None where none do."""
    found = _TAKEN_BACK.search(later)
    return None if found is None else f"the answer is taken back (`{found[0]}`)"


def _first_words(text: str) -> str:
    """Return `text` without the markup at its beginning."""
    at = 0
    while (markup := _MARKUP.match(text, at)) is not None:
        at = markup.end()
    return text[at:]
