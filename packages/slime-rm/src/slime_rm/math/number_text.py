"""Numbers as responses write them, and what may stand after one without making another of it."""

from __future__ import annotations

import re

from slime_rm.math.counted import MAX_CHARACTERS, says_what_is_counted

NUMBER = r"[-+−]?(?:US)?\\?[$€£]?[-−]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
"""A whole number or decimal as a regular expression, with thousands in groups and a sign of currency."""
MARKUP = "*_`$)]}€£ \t\r\\"
"""What closes around a number and says nothing of it."""

#: A letter right behind the digits is a unit (`72g`) or a symbol (`72x`, `72m` for millions).
_GLUED_SYMBOL = re.compile(r"[^\W\dghlsL_](?!\w)")
_ELLIPSIS = re.compile(r"\.\s?\.|…|\\[a-z]?dots")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_BLANK = re.compile(r"\\[,;: ]|~")
_CHANGES = re.compile(
    r"(?<![^\W\d_])(?:[kb]|(?-i:M)|bn|mn|mil|mln|hundreds?|thousands?|[mbtrq]\w{0,5}illions?|dozens?|scores?|gross|grand|lakhs?|crores?"
    r"|half|halves|quarters?|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|[mb]illion)ths?|percent\w*|per cent|pct"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,6}teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
    r"|point|plus|minus|times|multiplied|divided|over|squared|cubed|factorial|mod|modulo|double|twice|triple|negative|e|pi|x"
    r"|to|till|until|through|or|and|but|not|nor|either|maybe|perhaps|possibly|probably|if|unless|otherwise|alternatively|else"
    r"|wait|no|actually|sorry|about|around|approximately|approx|roughly|nearly|almost|less|more|fewer|off|ish|between"
    r"|halved|doubled|tripled|quadrupled|negated|inverted|reversed|tens|scratch|nope|typo|invalid|rejected|unsure|uncertain|doubtful"
    r"|wrong|wrongly|false|incorrect|incorrectly|without|except|instead|rather|than|versus|vs|is|isn't|was|wasn't|would|could|can't)(?![^\W\d_])",
    re.IGNORECASE,
)


def leaves_number(rest: str) -> bool:
    """Return whether what follows a number on its line leaves it as it is: nothing, or words that say what is counted.

    No other digit or sign may follow, no ellipsis, and no word that makes another number of it (`million`, `dozen`,
    `halved`, `th`), leaves it open (`or`, `about`, `if`) or is not known to do neither (`counted`).
    """
    if len(rest) > MAX_CHARACTERS and rest.strip(MARKUP + ".,;"):
        return False
    unit = _TEXT.sub(r"\1", _BLANK.sub(" ", rest)).lstrip("*_`$)]}\\").rstrip(MARKUP + ".,;")
    if _ELLIPSIS.search(rest) or (unit and re.match(r"[.,:;]\s*\S", rest)):
        return False
    if not unit.strip():
        return True
    return (
        _GLUED_SYMBOL.match(unit) is None
        and not any(found[0].lower() != "more" for found in _CHANGES.finditer(unit))
        and says_what_is_counted(unit.lstrip(MARKUP))
    )


def changes_number(words: str) -> bool:
    """Return whether the first of `words` makes another number of the one before it, or leaves it open."""
    return _CHANGES.match(words) is not None
