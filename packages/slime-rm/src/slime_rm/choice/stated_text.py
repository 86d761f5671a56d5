"""`states_text`: whether a text is all that a response gives as its answer, where the other options are not known."""

from __future__ import annotations

import re

from slime_rm.choice.option_text import BOX, TEXT, plain_response, with_marked_texts
from slime_rm.choice.option_words import FILL, NOUN, VERB

#: What may stand between the beginning of a sentence and the answer: nothing, or words that end in one that announces it.
_BEFORE = re.compile(
    rf"(?:\A|[.!?]\s|[:=→⇒是为]|\b(?:is|are|was|were|be|so|thus|hence|therefore|{NOUN}|{VERB})\b){FILL}\Z",
    re.IGNORECASE,
)
_REASON = r"(?:because|since|as|due to|given|not|rather than|instead of|over)"
_CALLED_CORRECT = r"\s+(?:is|was|must be|seems)\s+(?:the\s+)?(?:(?:correct|right|best|final)(?:\s+(?:answer|option|choice))?|answer)"
_AFTER = re.compile(
    rf"[\"')\]]*(?:{_CALLED_CORRECT})?[\s.!\"')\]]*(?:[,(–—-]?\s*\b{_REASON}\b(?!.*\b(?:answer|option|choice|correct|right)\b)(?:(?![.!?]\s).)*)?\Z",
    re.IGNORECASE,
)
_ANNOUNCED = re.compile(r"\b(?:answer|option|choice)\b[^.!?]*?(?:\bis\b|:)|[.!?]\s", re.IGNORECASE)
_IN_REASON = re.compile(rf"\b{_REASON}\b", re.IGNORECASE)


def states_text(response: str, text: str) -> bool:
    r"""Return whether a response ends in `text` as its answer, or holds nothing else in its last `\boxed{...}`.

    A response that writes one possible answer after the other contains the right one, too: where the other options are
    not known, only what stands alone is taken. Before it in its sentence may stand words that announce an answer, after
    it a reason, or words that call it correct.
    """
    mark = f"{TEXT[0]}?{TEXT[1]}"
    marked = with_marked_texts(plain_response(response), {"?": text}).rstrip()
    box = marked.rpartition(BOX[0])[2].partition(BOX[1])[0] if BOX[0] in marked else None
    line = box if box is not None else marked.rpartition("\n")[2]
    before, found, after = line.rpartition(mark)
    if not found or _BEFORE.search(before) is None or _AFTER.match(after) is None:
        return False
    announced = list(_ANNOUNCED.finditer(before))
    return _IN_REASON.search(before, announced[-1].end() if announced else 0) is None
