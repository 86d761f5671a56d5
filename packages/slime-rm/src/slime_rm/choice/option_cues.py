"""What the words around an option say of it: that it is chosen, thought possible, or rejected."""

from __future__ import annotations

import re
from enum import IntEnum

from slime_rm.choice.option_remarks import is_added, is_of_others
from slime_rm.choice.option_words import CUE_CHARACTERS, FILL, NOUN, VERB, words


class Role(IntEnum):
    """What a response says of an option where it names it; the larger, the more it decides."""

    REJECTED = -1
    NAMED = 0
    POSSIBLE = 1
    IMPLIED = 2
    """It follows (`so B`, `this gives B`); decides where nothing stronger does."""
    CORRECT = 3
    """It is called correct."""
    ANSWERED = 4
    """It is given as the answer, or stands alone on its line."""


_COPULA = words(
    r"\bis;\bare;\bwas;'s;\bbe;\bbecomes;\bremains;\bequals;\b(?:appears|seems|has|turns out|happens) to be;\best;\bist;\bes;è;é;是;为;:;=;→;⇒;[–—-]+>?"
)
_MARKED = re.compile(rf"\b{NOUN}\b(?:[^.!?;\n]*?)$", re.IGNORECASE)
_ANSWER = re.compile(
    rf"\b(?:(?:{NOUN}|(?:correct|right|best|true) \w+)\b[^.!?;\n]{{0,80}}{_COPULA}|(?:final )?answer|{VERB})\s*{FILL}$",
    re.IGNORECASE,
)
_COPULA_END = re.compile(rf"{_COPULA}{FILL}$", re.IGNORECASE)
_WRONG_NOUN = re.compile(
    rf"\b(?:wrong|incorrect|false|bad|worst|worse|least \w+|distract\w*|tempting|trap|second[ -]best|next[ -]best|my second|previous|earlier|former|trick|backup|fallback|other|opposite|common|usual|popular|frequent|typical|naive|wrongly|mistaken)"
    rf"\s+{NOUN}\b(?:(?!\b(?:so|thus|therefore|hence|but)\b)[^.!?;\n])*$|\b(?:runner[ -]?up|next[ -]best)\b[^.!?;\n]*$",
    re.IGNORECASE,
)
_IMPLIED = re.compile(
    rf"(?:\b(?:so|thus|therefore|hence|leav(?:es|ing)(?: us| me)?(?: with)?|left with|by (?:the process of )?(?:elimination|exclusion)|without (?:an?y? )?doubt|only|giv(?:es|ing)|match(?:es|ing)|fit(?:s|ting)|correspond(?:s|ing) (?:to|with)"
    rf"|yield(?:s|ing)|means?|point(?:s|ing) (?:to|at)|lead(?:s|ing) to|support(?:s|ing)|impl(?:y|ies)|namely|i\.?e\.?|think|believe|guess"
    rf"|(?:it|this|that|which|there|result|one|value|what)\s+(?:is|was|must be|has to be|should be|would be|can only be)|(?:it|that)'s"
    rf"|must be|has to be|can only be|but|rather|final|in the end|finally|overall|in conclusion|in summary|get|obtain|find|have|(?:none|no|nothing) (?:other than|but))|[→⇒∴=:])\s*{FILL}$",
    re.IGNORECASE,
)
_ANSWER_WITH_VALUE = re.compile(
    rf"\b(?:{NOUN}|result|value)\b[^.!?;\n]{{0,40}}{_COPULA}\s*(?!not\b|n't)[^\s()][^()\n]{{0,40}}$",
    re.IGNORECASE,
)
"""Words before an option in brackets: `the answer is 42 (B)`."""
_VALUE = re.compile(r"(?:^|=)\s*[^\s()=]{1,20}\s*$")
"""A value before an option in brackets: `x = 42 (B)`."""
_ADVERBS = r"(?:[\s,]*+(?:also|clearly|definitely|obviously|too|both|all|simply|just|therefore|thus|indeed|certainly|surely|most likely|likely|probably|always|then|hence|in fact|still|actually|really|totally|completely|entirely|plainly|quite)\b,?+)*"
_BE = r"(?:\b(?:is|are|was|were|seems?|looks?|appears?|remains?|(?:must|has to|have to|should|will|would|can only) be|being|to be)\b(?: to be\b)?|'s\b)"
_GOOD = words(
    r"correct\w*;right;(?:most|more) \w+;(?:best|better|preferable|superior|accurate|proper|valid)\b;(?:the|my|our)?\s*(?:(?:only|single|most|final|best|correct|right|likely|consistent)\s+)*"
    r"(?:answers?|choices?|options?|solution|winner|pick|one)\b"
)
_CALLED_CORRECT = re.compile(
    rf"[)\]\s:–—,-]*(?:{_ADVERBS}\s*{_BE}{_ADVERBS}\s+(?:the\s+|an?\s+|my\s+)?{_GOOD}(?!\s+(?:only\s+)?(?:if|unless|when|about|at first|initially|at a glance))"
    rf"|\s*it is\b|(?:[:)–—-]|\()\s*(?:correct|right|true|yes|✓|✔|✅)(?!\w)|\s*[✓✔✅])",
    re.IGNORECASE,
)
_FITS = re.compile(
    rf"[)\]\s,]*{_ADVERBS}\s*(?:fits?|match(?:es)?|works?|wins?|holds?|stands?|remains?|is (?:left|true|chosen|selected)|does|is)(?=\s*(?:[.,;!)]|$)"
    r"|\s+(?:best|better|well|perfectly|exactly|all|the|every\w*|only(?! \w+ly\b)|here|alone|while|whereas|although|but)\b)"
    r"|[)\]\s,]*(?!(?:is|was|are|were|not|no)\b)\w+s\s+(?:(?!(?:no|not|never|hardly)\b)[\w']+\s+){0,3}?(?:better|more\s+\w+)\s+than\s+(?:option |choice )?\W*$",
    re.IGNORECASE,
)
_NOT_DOUBT = r"(?<!\bno )(?<!without )(?<!without a )(?<!without any )"
_BEFORE_REJECTED = re.compile(
    rf"(?:\b(?:not(?! (?:only|just|merely)\b)|by no means|in no way|on no account|under no circumstances|never|neither|nor|cannot|none of|{_NOT_DOUBT}doubt\w*|unlikely|hardly|rul(?:e|es|ed|ing) out"
    rf"|reject(?:s|ed|ing)?|eliminat(?:e|es|ed|ing)|exclud(?:e|es|ed|ing)|discard(?:s|ed|ing)?|dismiss(?:es|ed|ing)?|avoid|against|cross(?:ed|ing)? out"
    rf"|over|rather than|instead of|better than|(?<!other )than|unlike|except|excluding|besides|nobody|no one|few|as opposed to|opposed to|compared (?:to|with)|anything but|all but"
    rf"|far from|contrary to|no longer|beats?|without|scratch(?! that)|(?:refus\w+|wrong|mistake|error|unwise|foolish|silly|absurd|crazy|stupid|ridiculous) to|no (?:reason|need|point|evidence|basis|justification|support|case)\b)\b|n't\b(?! (?:only|just)\b)|\b(?:wrong|incorrect|false|rejected|eliminated)\s*(?:\w+\s*)?:|(?<!wait )(?<!wait, )(?<!oh )\bno\s+(?:option\s+|choice\s+)?$)"
    r"[^,;.!?\n]*$",
    re.IGNORECASE,
)
_DOUBLE_NO = re.compile(
    r"(?:\bnot|n't|\bnever|\bcannot|\bcan not)\s+(?:\w+\s+){0,3}?(?:rule out|reject|exclude|eliminate|dismiss|discard|doubt|think\b.*\b(?:wrong|incorrect|false))[^,;.!?\n]*$"
    r"|\bnot only\b[^,;.!?\n]*$",
    re.IGNORECASE,
)
_BAD = (
    r"(?:wrong|false|incorrect\w*|impossible|invalid|out|eliminated|excluded|rejected|ruled|unlikely|less|implausible|untrue|inconsistent|contradict\w*"
    r"|bad|mistaken|irrelevant|too\s+\w+|neither|worse|no\b|nonsense|unphysical|discarded|dismissed|inaccurate|(?:\w+\s+){0,2}?(?:distract\w+|decoys?|traps?|mistakes?|misconceptions?|fallacy|pitfalls?|confusions?|foils?|red herrings?|lures?|baits?|tricks?|errors?|impostors?|fakes?|runner[- ]?up|(?:wrong|incorrect|false|mistaken) (?:answer|choice|option|one|pick))\b|(?:second|next)[- ](?:best|choice)|tempting|silly|foolish|absurd|crazy|stupid|ridiculous|unwise|least\b)"
)
_AFTER_REJECTED = re.compile(
    rf"[)\]\s:,(–—→⇒=>-]*(?:{_ADVERBS}\s*{_BE}{_ADVERBS}\s+(?:\w+ly\s+)?(?:(?:the|an?)\s+)?(?:not\b|never\b|no longer\b|{_BAD})"
    rf"|(?:(?:wrong|false|incorrect|impossible|invalid|eliminated|excluded|rejected|ruled out|out)\b|no\s*(?=[.,;)]|$)|[✗✘❌×])(?!\w)|(?:is|are|was|were|does|do|did|can|could|would|will|has|have)(?:n't| not)\b|cannot\b|won't\b|fails?\b|violates?\b|contradicts?\b|loses\b"
    r"|(?:can|could|may|might) (?:also |well |safely |now )?be (?:ruled|eliminated|excluded|rejected|discarded|dismissed|crossed|wrong|false|incorrect)\b"
    r"|(?:but|yet|though|however,?)\s+(?:it|that|this)(?:'s|\s+is|\s+was)?\s*(?:n't|\bnot)?\s*\b(?:a lie|wrong|false|incorrect|mistaken|(?<=not )(?:right|correct|true|the (?:answer|right|correct)|it)|(?<=n't )(?:right|correct|true|the (?:answer|right|correct)|it))\b"
    rf"|(?:{_BE}\s+(?:the|an?)\s+\w+\s+)?(?:that|which) (?:(?!not\b|never\b)\w+(?:'d|'ll)?\s+){{1,3}}?(?:exclude|eliminate|reject|rule out|dismiss|discard|avoid)\w*\b)",
    re.IGNORECASE,
)
_NOT_BAD = re.compile(
    rf"[)\]\s,]*(?:{_BE}\s+(?:not|never)|(?:is|are|was|were|can|could|would)(?:n't| not)( be)?|cannot be)\s+(?:\w+ly\s+)?(?:wrong|false|incorrect|impossible|bad|excluded|eliminated|ruled out)",
    re.IGNORECASE,
)
_BEFORE_POSSIBLE = re.compile(
    rf"(?:\bas (?:\w+ as|well as)|\b(?:could|might|may|can)(?: also| well| still| even| just| equally)? be|\b(?:or equivalently|maybe|perhaps|possibly|potentially|alternatively|or|otherwise|if not|also(?: think| believe| choose| pick| say)?|even|equally|either|not only"
    rf"|but also|so (?:does|do|is|are|would|could)|and|unless|unless (?:it|this|that) is|failing (?:which|that)|lest)|[/|+&])\s*{FILL}$",
    re.IGNORECASE,
)
_INSTEAD = re.compile(
    r"\W*(?:alternatively|or(?! rather)|otherwise|if not|else|failing that)\b", re.IGNORECASE
)
"""Words that begin a sentence and make what it chooses one of several."""
_AFTER_POSSIBLE = re.compile(
    rf"[)\]\s,]*(?:(?:could|might|may|can)(?: also| well| still| even| just| equally)? (?:be|work|hold|fit)\b(?! tempting)"
    rf"|{_BE}\s+(?:also|equally|possible|plausible|acceptable|likely|close|just as)\b|if\b|otherwise\b|unless\b|when\b|depending\b)",
    re.IGNORECASE,
)
_CLOSE_BUT_WRONG = re.compile(
    rf"[)\]\s,]*{_BE}[^.;!?\n]*?\b(?:but|yet|though)\s+(?:\w+\s+){{0,2}}?(?:not\b|\w+n't\b|fails?\b|{_BAD})",
    re.IGNORECASE,
)
_CONTRARY_TO_FACT = re.compile(
    r"\s*,?\s*(?:(?:would|could|might|may)\b[^.;!?\n]*)?\bif\b[^.;!?\n]*\b(?:were|had)\b(?!\s+to\s+(?:choose|guess|pick|say|answer))"
    r"|\s*,?\s*(?:(?:would|could|might|may)\b[^.,;!?\n]*?)?\b(?:were|had)\s+(?:the|it|this|that|we|i|you|they|there|an?)\b",
    re.IGNORECASE,
)
OR_NONE = re.compile(
    r"[)\]\s,(]*with\s+(?:an?\s+|equal\s+)?(?:[\d.,/%]+\s+)?(?:probability|likelihood|odds|chances?)\b"
    r"|[)\]\s,(]*(?:[/|]|(?:and/)?or\b|unless\b)\s*(?:else\s+|it\s+|it's\s+|is\s+)*"
    r"(?:none|nothing|neither|not|no|something|another|others?)\b(?!\s*[,:])",
    re.IGNORECASE,
)
"""Words after an option that take it for one of several possibilities, of which the others are none or are not named."""
_ALSO = re.compile(
    r"[)\]\s,]*(?!(?:would|does|do|did|has|had)\b)(?:\w+\s+){0,3}(?:too|as well|also)\s*(?:[.,;!)]|$)",
    re.IGNORECASE,
)
_OPENS_CLAUSE = re.compile(
    r"(?:^|[,;.(–—-]|\b(?:and|but|or|also|yet))\s*(?:option|choice|answer)?\s*$", re.IGNORECASE
)
_EXCEPT = re.compile(
    r"\b(?!(?:none|no|nothing) (?:other than|but)\b)(?:all|every\w*|none|nothing|no \w+|any\w*|each)\b[^,;.!?\n]*\b(?:but|except(?: for)?|besides|other than|apart from|save)\s+(?:option\s+|choice\s+|for\s+)*$",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r"\b(?:since|because|as|given|considering|while|whereas|although|though|even if|which|where|that|due to|owing to|by|from|of|in|with|for|unlike|see|using)\b[^,;.!?\n]*$",
    re.IGNORECASE,
)
_EARLIER = re.compile(
    r"\b(?:thought|believed|used to|people|students?|others|everyone|anyone|someone|one might|you (?:might|may)|was going to|about to|nearly|almost(?! certain)|on the verge of|wanted to|(?:was )?tempted to|initially|superficially|(?:may|might|could) (?:seem|appear|look)|at first|first(?! and only)|originally|would have|(?:naive|careless|hasty|casual|typical) \w+)\b[^,;.!?\n]*$",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(r"\b(?:if|had|suppose|assuming)\b.*\bwould(?: have been| be)\b[^,;]*$", re.IGNORECASE)
_HYPOTHETICAL = re.compile(
    r"\b(?:if|suppos(?:e|ing)|assum(?:e|ing)|imagin(?:e|ing))\b(?![^,;.!?\n]*(?:'d|'ll|\b(?:would|will|had to|have to|must|forced))\b)[^,;.!?\n]*$",
    re.IGNORECASE,
)
_CONCEDED = re.compile(
    r"\b(?:though|although|while|whereas|even if|if|suppos\w+|assum\w+)\b[^,;.!?\n]*$", re.IGNORECASE
)
REASONS = re.compile(r"\b(?:since|because|given that|as|for)\b", re.IGNORECASE)
"""Words after which a sentence gives reasons."""
CORRECTION = re.compile(
    r"^\W*(?:oh,? )?mistake\b|\bno\b(?=\s*[,.:;!–—-]|\s*$|\s+wait)|\b(?:wait|actually|sorry|correction|oops|scratch that|never ?mind|i mean(?:t)?|on (?:second thought|reflection)|rather,|or rather|make that|chang\w+(?!\s+(?:the|an?|of|in|its|sign)\b(?!\s+(?:answer|choice|mind|selection|option|response)))"
    r"|switch\w*|revis\w+|(?:my|own) (?:\w+ )?mistake|made (?:an?|some|the|another) (?:\w+ )?(?:mistake|error)|(?:that|this|it|which|there)(?: is| was|'s) an? (?:\w+ )?mistake|misread|was wrong|hmm|hold on|let me (?:re\w+|correct)|strike that|(?:just )?kidding|now (?:it|the|my|i)|corrected|reconsider\w*)\b",
    re.IGNORECASE,
)
"""Words that take an earlier decision back."""


def role_of(before: str, after: str, sentence: str, *, decided: bool, behind_value: bool = False) -> Role:
    """Return what a sentence says of an option, or of several in a row, from the words around it.

    Args:
        before: the words since the option named before it in the sentence.
        after: the words up to the next.
        sentence: all words of the sentence before it.
        decided: the sentence has given an answer already; what it gives as reasons then is no second one.
        behind_value: it stands in brackets, is the first in the sentence and ends it: `x = 42 (B).`
    """
    if _DOUBLE_NO.search(before) or _NOT_BAD.match(after):
        return Role.POSSIBLE if "only" in before.lower() else Role.NAMED
    bad_after = _AFTER_REJECTED.match(after) is not None
    if OR_NONE.match(after):
        return Role.REJECTED
    if _CONTRARY_TO_FACT.match(after) or _CLOSE_BUT_WRONG.match(after):
        return Role.NAMED
    if _EXCEPT.search(before):
        return Role.CORRECT if bad_after else Role.REJECTED
    if bad_after or _BEFORE_REJECTED.search(_last_clause(before)):
        return Role.REJECTED
    begin = max(0, len(before) - CUE_CHARACTERS)
    answered = _ANSWER.search(before, begin) is not None and not is_of_others(before, after)
    if _AFTER_POSSIBLE.match(after) and not (not decided and answered):
        return Role.POSSIBLE
    if _BEFORE_POSSIBLE.search(before, begin) and not (answered and not decided):
        return Role.POSSIBLE if decided or not _CALLED_CORRECT.match(after) else Role.CORRECT
    if answered and not decided and _INSTEAD.match(before):
        return Role.POSSIBLE
    if is_added(before, after) or (_ALSO.match(after) and _OPENS_CLAUSE.search(before)):
        return Role.POSSIBLE
    if decided and _ASIDE.search(before):
        return Role.NAMED
    if (
        _WRONG_NOUN.search(before)
        or _EARLIER.search(before)
        or _SUPPOSED.search(sentence)
        or _HYPOTHETICAL.search(before)
    ):
        return Role.NAMED
    with_value = behind_value and _ANSWER_WITH_VALUE.search(before, begin) is not None
    if with_value or answered or (_COPULA_END.search(before, begin) and _MARKED.search(sentence)):
        return Role.ANSWERED
    if _CONCEDED.search(before):
        return Role.NAMED
    if _CALLED_CORRECT.match(after):
        return Role.CORRECT
    if _IMPLIED.search(before, begin) or _FITS.match(after) or (behind_value and _VALUE.search(before)):
        return Role.IMPLIED
    return Role.NAMED


def _last_clause(before: str) -> str:
    """Return what follows the last word that begins a new clause, which a negation before it does not reach."""
    return re.split(
        r"\b(?:but|so|therefore|thus|hence|then|because|since|yet)\b", before, flags=re.IGNORECASE
    )[-1]


_REST_OF_NOUN = re.compile(rf"^\s+(?:\w+\s+)?{NOUN}\b", re.IGNORECASE)


def without_predicate(between: str) -> str:
    """Return the words between two options without those that call the first correct: `, ` of `is the answer, `."""
    found = _CALLED_CORRECT.match(between)
    if found is None:
        return between
    return _REST_OF_NOUN.sub("", between[found.end() :])
