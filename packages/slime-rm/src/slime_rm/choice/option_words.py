"""Words from which the patterns of cues and remarks are made."""

from __future__ import annotations


def words(text: str) -> str:
    """Return the pattern of any of the words between semicolons."""
    return "(?:" + "|".join(text.split(";")) + ")"


CUE_CHARACTERS = 300
"""Where a cue that the option follows is looked for: this many characters before it, so that the time is linear."""

NOUN = words(
    "answers?;choices?;options?;solution;winner;selection;pick;response;guess;conclusion;verdict;letter;alternative;one;réponse;antwort;respuesta;risposta;resposta;答案;ответ"
)
#: What may stand between a cue and the option without changing what it says.
FILL = (
    r"(?:(?:definitely|clearly|certainly|most likely|likely|probably|indeed|thus|therefore|hence|simply|just|of course"
    r"|still|then|really|surely|obviously|now|only|always|again|actually|in fact|in truth|the|an?|that|my|final|correct|right|best|proper"
    r"|option|choice|answer|letter|statement|item|alternative|candidate|number|possibility|labell?ed|marked|is|be|to be)\b"
    r"|[\s:=\"'“(\[>*~–—.→⇒∴,-])*+"
)
VERB = words(
    r"choose;chose;chosen;choosing;pick(?:ed|ing)?;select(?:ed|ing)?;opt(?:ed|ing)? for;go(?:ing)? (?:for|with);went (?:for|with)"
    r";settled? (?:on|for);vote for;mark;circle;bet on;commit(?:ting)? to;conclude;say;lean(?:ing)? towards?;answer(?:ed)?;stick(?:ing)? with;prefer;favou?r;accept(?:s|ed|ing)?"
)
