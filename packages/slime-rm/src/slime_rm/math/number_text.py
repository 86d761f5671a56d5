"""Numbers as responses write them, and what may stand after one without making another of it."""

from __future__ import annotations

import re

NUMBER = r"[-+−]?(?:US)?\\?[$€£]?[-−]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
"""A whole number or decimal as a regular expression, with thousands in groups and a sign of currency."""
MARKUP = "*_`$)]}€£ \t\r\\"
"""What closes around a number and says nothing of it."""

_LETTER = r"[^\W\d_\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209f\u2150-\u218f]"
#: At most four words; a letter right behind the digits is a unit (`72g`) or a symbol (`72x`).
_UNIT = re.compile(
    rf"(?!{_LETTER}(?<![ghlsL])(?!\w))(?:\s?{_LETTER}++(?:[-'’]{_LETTER}++)*['’.]?(?:/{_LETTER}++)?(?:[²³]|\^[23])?){{1,4}}"
)
_CHANGES = re.compile(
    r"(?<![^\W\d_])(?:[kb]|(?-i:M)|bn|mn|mil|mln|hundreds?|thousands?|[mbtrq]\w{0,5}illions?|dozens?|scores?|gross|grand|lakhs?|crores?"
    r"|half|halves|quarters?|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|[mb]illion)ths?|percent\w*|per cent|pct"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,6}teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
    r"|point|plus|minus|times|multiplied|divided|over|squared|cubed|factorial|mod|modulo|double|twice|triple|negative|e|pi|x"
    r"|to|till|until|through|or|and|but|not|nor|either|maybe|perhaps|possibly|probably|if|unless|otherwise|alternatively|else"
    r"|wait|no|actually|sorry|about|around|approximately|approx|roughly|nearly|almost|less|more|fewer|off|ish|between"
    r"|wrong|false|incorrect|without|except|instead|rather|than|versus|vs|is|isn't|was|wasn't|would|could|can't)(?![^\W\d_])",
    re.IGNORECASE,
)


def leaves_number(rest: str) -> bool:
    """Return whether what follows a number on its line leaves it as it is: nothing, or words that are a unit.

    No other digit or sign may follow, and no word that makes another number of it (`million`, `dozen`, `percent`,
    `squared`, `half`) or leaves it open (`or`, `about`, `not`, `if`).
    """
    unit = rest.lstrip("*_`$)]}\\").rstrip(MARKUP + ".,;")
    if re.match(r"[.,:;]\s*\S", rest) and unit:
        return False
    return not unit or bool(_UNIT.fullmatch(unit) and not _CHANGES.search(unit))


def changes_number(words: str) -> bool:
    """Return whether the first of `words` makes another number of the one before it, or leaves it open."""
    return _CHANGES.match(words) is not None
