"""Remarks on an option that do not decide for it: what others choose, mistakes, other questions, what is contrary to fact."""

from __future__ import annotations

import re

from slime_rm.choice.option_words import CUE_CHARACTERS, FILL, NOUN, VERB
from slime_rm.text.last_match import last_match

_VERB = re.compile(rf"\b(?:(?P<noun>(?:final )?answer)|(?P<verb>{VERB}))\s*{FILL}$", re.IGNORECASE)
_CLAUSE_END = re.compile(
    r"[,;:.!?()–—]|\b(?:and|but|so|then|therefore|thus|hence|because|since|yet|that's why)\b", re.IGNORECASE
)
_MISTAKE = (
    r"(?:mistak\w+|mis(?:conceptions?|readings?|understandings?)|errors?|erroneous\w*|pitfalls?|traps?|slips?|blunders?|fallac\w+|tempt\w+|temptations?|oversights?"
    r"|confusions?|wrong\w*|incorrect\w*|false\w*|naive\w*|careless\w*|hast\w+|unwise|foolish|silly|easy(?!\s+to\s+(?:see|show|check|verify|find|notice|recogni[sz]e|tell))|intuition|bait|lure\w*)"
)
_MISTAKEN = re.compile(rf"\b{_MISTAKE}\b", re.IGNORECASE)
_OTHERS = r"(?:one|you|they|he|she|who|whoever|those|people|persons?|students?|pupils?|others?|many|most|some|few|several|everyone|everybody|anyone|anybody|someone|somebody|beginners?|novices?|readers?|guessers?|test[- ]takers?|candidates?|learners?|models?|llms?|ais?|chatgpt|gpt|friends?|teachers?|professors?|colleagues?|classmates?|majority|half|layman|laymen|physicists?|critics?)"
_WHO = re.compile(
    r"\b(?P<speaker>(?-i:I|We|we|me|us|Us)|let's|i'd|i'm|i'll)\b(?!\s+(?:see|know|expect|imagine|suspect|bet)\b)"
    rf"|\b{_OTHERS}\b",
    re.IGNORECASE,
)
_ORDER = re.compile(
    r"[\s\"'*>•–—-]*(?:(?:ok|okay|so|thus|therefore|hence|then|now|please|just|simply|finally|ultimately|overall|accordingly|consequently|and|better|always"
    r"|definitely|clearly|certainly|surely|probably|most likely|likely|obviously|confidently|tentatively|hereby|instead|rather|actually|again|still|also|have|having|to|will"
    r"|in conclusion|in summary|in the end|must|should|the|my|our|final|finally|is|it is|would|a|an|as|or|only|can|could|not|never|wait|no|sorry|correction|conclusion|do)\b[\s\"'*-]*)*",
    re.IGNORECASE,
)
_OUGHT = re.compile(
    r"\b(?:should|must|ought to|ha(?:s|ve) to|needs? to|shall|best|safest?|wis(?:e|est)|sensible|reasonable|correct(?:ly)?|right(?:ly)?|proper|logical|recommend\w*|suggest\w*|advis\w+|decision|able to|allow\w*|leads?|led|forc\w+|rational|justified)\b",
    re.IGNORECASE,
)
_WHOEVER = re.compile(r"\b(?:who|whoever|those|any(?:one|body)|some(?:one|body))\b", re.IGNORECASE)
_NAMED = re.compile(rf"\b{NOUN}\b", re.IGNORECASE)
_LEADS = re.compile(
    r"\W*(?:(?:so|thus|therefore|hence)\s+)?(?:based on|by|after|from|given|considering|using|with|for|on|upon|via|as a result)\b",
    re.IGNORECASE,
)
_GERUND_ENDS = re.compile(
    r"\W*(?:$|[.!;)]|(?:,\s*)?(?:because|since|as|over|rather|instead of|not|for (?:its|this|these)|given|due)\b"
    r"|(?:is|would be|seems)\s+(?:\w+ly\s+|thus\s+|therefore\s+)?(?:the\s+)?(?:correct|right|best|safest|justified|appropriate)\b)",
    re.IGNORECASE,
)
_TITLE = re.compile(rf"\b{_MISTAKE}\s*[:–—-]\s*$", re.IGNORECASE)
_CONSIDERED = re.compile(
    r"\b(?:consider(?:ed|ing)?|contemplat\w+|thought (?:about|of)|toy\w+ with|debat\w+|resist\w*|regret\w*)\s+$",
    re.IGNORECASE,
)
_INFINITIVE = re.compile(r"\bto\s+$", re.IGNORECASE)
_ADDED = re.compile(
    r"\b(?:also|equally|or|either|as well|alternatively|otherwise)\b"
    r"|\b(?:one|you)\s+(?:can|could|may)\b",
    re.IGNORECASE,
)
_PAST = r"(?:were|was|had|did|didn't|weren't|wasn't|hadn't|took|used|made|left|meant|read|gave|forgot|chose|misread|(?!(?:need|proceed|exceed|succeed|speed|feed|seed|indeed|hundred)\b)\w{2,}ed)"
_FORCED = r"(?:(?:had|have|has) to|must|needed to|forced to|pressed to|(?:asked|told|made|required|allowed) to)\s+(?:choose|pick|guess|say|select|decide|answer|bet|commit|give an answer)\b(?!\s+(?:another|a second|a different))"
_IF = r"(?:\b(?:if|suppos(?:e|ing)|assuming|provided|imagin(?:e|ing))\b)"
_COUNTERFACTUAL = re.compile(
    rf"{_IF}(?![^.;!?\n]*\b{_FORCED})[^.;!?\n]*?\b{_PAST}\b|^\W*(?:were|had)\s+(?!to\b)(?:the|it|this|that|we|i|you|there|they|an?)\b",
    re.IGNORECASE,
)
_WOULD = re.compile(r"\b(?:would|could|might)\b|'d\b", re.IGNORECASE)
_WOULD_AFTER = re.compile(r"[)\]\s]*(?:(?:would|could|might|may|should)\b|'d\b)(?! not\b|n't)", re.IGNORECASE)
_ANOTHER = (
    r"(?:converse|inverse|reverse|opposite|previous|preceding|prior|earlier|other|another|different|separate|similar|related|easier|harder|simpler"
    r"|modified|altered|changed|alternat\w+|analogous|follow-?up|bonus|sister|companion|complementary|negated|old)\s+(?:\w+\s+)?"
    r"(?:questions?|problems?|parts?|items?|exercises?|tasks?|quiz(?:zes)?|exams?|tests?|versions?|variants?|wordings?|formulations?)\b"
)
_OTHER_QUESTION = re.compile(
    rf"(?:\b{NOUN}\s+|^\W*)(?:to|of|in|for|on|with)\s+(?:\w+\s+)?{_ANOTHER}"
    rf"|\b{_ANOTHER}(?:'s?|\s+ha[sd])\s+\w+"
    r"|\b(?:original|original textbook|textbook|printed|published|first|initial)\s+(?:version|variant|wording|formulation|edition|form)s?\b"
    rf"|{_IF}\s+(?:(?:you|we|one|they|it|the|this|that|question|problem|instead|i)\s+)*(?:(?:were|was|is|are|had|been|has|instead|only)\s+)*(?:ask(?:ed|s)?|want(?:ed|s)?)\b(?!\s+to\s+(?:choose|pick|guess|select|decide|answer|say|bet|commit))"
    r"|\b(?:forced|asked|pressed|allowed|required|told|had|have)\s+to\s+(?:\w+\s+){1,2}(?:another|a\s+second|a\s+different|an\s+alternative|a\s+backup|a\s+runner)\b",
    re.IGNORECASE,
)
_ANSWERS_ANOTHER = re.compile(
    rf"[)\]\s]*(?:(?:is|was|would be|might be)\s+(?:the|an?)\s+(?:\w+\s+)?{NOUN}\s+(?:to|of|in|for|on)|(?:would )?(?:answers?|fits?|solves?))\s+(?:(?:the|an?|that|my)\s+)?{_ANOTHER}",
    re.IGNORECASE,
)
_REPORTED = re.compile(
    rf"\b{_OTHERS}\s+(?:\w+\s+){{0,2}}?(?:says?|said|claims?|claimed|insists?|argues?|argued|thinks?|believes?|reckons?|suggested)\b[^.;!?\n]*$",
    re.IGNORECASE,
)
_THIS = (
    r"(?:this|these|not|its|being|having|that reason|those reasons|the (?:given|present|above|current|same|question|problem|following|sake|actual|stated|reasons?|best|correct|right|most)|given|our|my|me|us|all|any|each|both"
    r"|reasons?|clarity|completeness|final|conclusion|summary|short|fact|total|general|brief|sum|light|view|accordance|terms|line|order|other words|example|instance|which|what|it|now|sure|here|certain)\b"
)
_PREFIX = re.compile(
    rf"^\W*(?:(?:and|but|also|however|whereas|while|note that|similarly|conversely)\b[\s,]*)*(?:(?P<about>for|as for|regarding|concerning|in (?:the )?case(?: of)?|should(?=\s+(?:the|it|this|one|you|they)\b)|changing|replacing|swapping|(?:when|{_IF})(?!\s+(?:we|i)\b))"
    r"|in|on|at|with|without|under|inside|outside|near|above|below|ignoring|neglecting|including|given|by)"
    rf"\s+(?!{_THIS})(?![^.;!?\n]*\b(?:so|thus|therefore|hence|we (?:get|see|find|have)|means|implies|follows)\b)(?![^.;!?\n]*{_FORCED})[^.;!?\n]*",
    re.IGNORECASE,
)
_WAS = re.compile(r"\b(?:would|was|were|used to)\b|'d\b", re.IGNORECASE)
_ANSWER_FOR = re.compile(
    rf"\b{NOUN}\s+(?:(?:for|in|on|at|with|without|under|if|when|to|of)\s+(?!{_THIS}|the\b|which\b|the option)|(?:for|in|on|at|with|without|under|if|when|to)\s+the\s+(?!(?:given|present|above|current|same|question|problem|following|original|actual|exercise|stated|task|initial|first)\b))[^.;!?,\n]*\b(?:is|was|would be|:)\s*{FILL}$",
    re.IGNORECASE,
)
_ANSWER_OF_OTHERS = re.compile(
    rf"\b{NOUN}\s+(?:that\s+|which\s+)?(?:(?:given|chosen|picked|selected|preferred|favou?red)\s+by|of|from)?\s*(?:(?:the|a|an|my)\s+)?(?:most|many|some|careless|weak\w*|hasty|other|all)?\s*(?:students?|people|others|everyone|beginners?|novices?|they|classmates?|friends?|critics|test[- ]takers?|readers|models?|llms?)\b"
    rf"|\b(?:students?'s?|people's|everyone's|others'|their|his|her|beginners?'s?|friend's|classmate's|model's|llm's|teacher's|author's|(?:text)?book's|(?-i:(?!Let's|Here's|That's|What's|It's|There's|Who's|Today's|He's|She's)[A-Z][a-z]+'s))\s+(?:\w+\s+)?{NOUN}\b",
    re.IGNORECASE,
)
_ANSWER_OF_ANYONE = re.compile(
    rf"\b{NOUN}\s+(?:that\s+|which\s+)?(?:you|one)(?:'d|'ll)?\s+(?!should\b|must\b|are looking|were looking|need\b|want\b)\w+",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(
    rf"[)\]\s]*(?:(?:would|could|might|may)\b|'d\b)[^.;!?\n]*?\b(?:for|in|on|under|at|with|without|to|of|had|were|only|instead|elsewhere|otherwise)\b(?!\s+{_THIS})(?!\s+(?:the )?(?:question|answer|choose|pick))",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\banswer\s*[(\[\"']*$", re.IGNORECASE)
_PREDICATE = re.compile(
    r"[)\]\"']*\s+(?!(?:because|since|as|due|given|by|based|not|over|rather|instead|and|or|here|which|for|from|in|with|it)\b)(?!(?:is|was)\s+(?:\w+\s+){0,3}?(?:correct|right|best|answer|true)\b)[a-z]"
)
"""What is said of an option that `answer` only labels: `answer B ignores friction`."""
_ON_CONDITION = re.compile(
    rf"[)\]\"']*,?\s+(?:only\s+)?(?:if|when|whenever|in case|for|under|unless)\b(?!\s+{_THIS})", re.IGNORECASE
)
_QUESTIONS = re.compile(
    rf"(?<!\bthis )(?<!\bour )(?<!\bthe )\b(?:question|problem|part|exercise|item|quiz)\s*\d*'s?\s+(?:\w+\s+)?{NOUN}\b|^\W*to\b[^.;!?\n]*\binstead\b"
    r"|\b(?:question|problem|part|exercise|item)\s*\d+\b[^.;!?\n]*\banswer\b|\b(?:second|third|next)[ -](?:choice|guess|pick|best)\b",
    re.IGNORECASE,
)
_WOULD_DO = re.compile(r"[)\]\s]*(?:would|'d)\s+(?!be\b|also\b|have been\b|still\b|not\b)\w", re.IGNORECASE)
_LIMITED = re.compile(
    r"[)\]\s]*(?:is|are|was|holds?|works?|fits|applies|would be|seems|looks)\b(?:[^.,;!?\n]*?\b(?:correct|right|true|valid|the answer|best)(?:\s+(?:answer|choice|option|one))?)?\s*(?:only\s+(?:in|for|on|under|at|with|without)\b|(?:in|for|on|under|at|with|without)\s[^.,;!?\n]*\bonly\s*(?:[.;!]|$))",
    re.IGNORECASE,
)
_GOOD_LOOK = r"(?:right|correct|true|plausible|promising|attractive|appealing|tempting|reasonable|fine|good|valid|similar|close|convincing|like|likely|ok|okay|possible|nice|obvious)"
_LOOKS_BUT = re.compile(
    rf"[)\]\s]*(?:(?:may|might|could|can|would|does)\s+)?(?:also\s+)?(?:looks?|seems?|appears?|sounds?|feels?)\b[^.;!?\n]*?\b{_GOOD_LOOK}\b[^.;!?\n]*?\b(?:but|yet|though|although|until|except|however|only)\b(?!\s+(?:so|it is|is|it's)\b(?!\s+(?:not|wrong|false|incorrect)))",
    re.IGNORECASE,
)
_BUT_NOT_HERE = re.compile(
    r"[)\]\s]*(?:(?:could|might|may|can|would)\b[^.;!?\n]*\b(?:but|yet|though)\b[^.;!?\n]*\b(?:not|n't|never|only|different|another|here it)\b"
    r"|(?:is|was|holds?|works?)\b[^.;!?\n]*\b(?:but|yet|though)\s+(?:only|not)\s+(?:here|in|for|this|at|under|on|the case)\b)",
    re.IGNORECASE,
)
_NOUN_FOLLOWS = re.compile(
    r"\b(?:the|final|correct|my|our|an?|this|that|best|right|only|is|as|which|your|one)\s+$", re.IGNORECASE
)
_GIVES = re.compile(r"\s*(?:(?:is|be|was|would)\b|[:=→⇒–—-])", re.IGNORECASE)
_IDEOGRAPH = re.compile(r"[\u3400-\u9fff]")
_ARGUED = re.compile(
    r"\b(?:so|thus|therefore|hence|but|yet|which means|it follows|we (?:get|see|find|have))\b", re.IGNORECASE
)
"""Words after which an argument is left behind and what it says is claimed."""
_PERCENT = re.compile(
    r"(?P<percent>\d{1,3}(?:\.\d+)?)\s*(?:%|percent|per cent)\s*(?:sure|certain|confident|convinced|positive|chance|probab\w+|likel\w+|that\b|for\b|on\b|it\b)"
    r"(?![^.;!?\n]*(?:,|\b(?:so|thus|therefore|hence|means|gives)\b))[^.;!?\n]*$"
    r"|\b(?:probability|confidence|likelihood|chance|certainty)\s+(?:of|is|at|:)?\s*(?P<of>\d{1,3}(?:\.\d+)?)\s*(?:%|percent)\s+(?:that|for|it)\b[^,.;!?\n]*$",
    re.IGNORECASE,
)

_ODDS = re.compile(r"\b(?:odds|probability|chances?|likelihood|confidence)\b[^,.;!?\n]*$", re.IGNORECASE)
_PERCENT_BEHIND = re.compile(
    r"[)\]\s]*(?:is|are|stands? at|at)\s+(?:\w+\s+)?(?P<percent>\d{1,3}(?:\.\d+)?)\s*(?:%|percent)",
    re.IGNORECASE,
)


def is_remark(before: str, after: str, *, settled: bool) -> bool:
    """Return whether a sentence names an option without deciding anything about it.

    It says what others choose or what a mistake leads to, answers another question, supposes what is contrary to fact,
    or gives the option less than half of the odds.

    Args:
        before: the words since the option named before it in the sentence.
        after: the words up to the next.
        settled: an answer has been given that nothing has taken back: a condition then makes another question of it.
    """
    claim = _ARGUED.split(before)[-1]
    if _COUNTERFACTUAL.search(claim) and (
        _WOULD_AFTER.match(after) or _WOULD.search(claim.rpartition(",")[2])
    ):
        return True
    if _OTHER_QUESTION.search(claim) or _ANSWERS_ANOTHER.match(after):
        return True
    if _REPORTED.search(claim) or _ANSWER_OF_OTHERS.search(claim):
        return True
    if (
        _LOOKS_BUT.match(after)
        or _BUT_NOT_HERE.match(after)
        or _LIMITED.match(after)
        or _is_unlikely(before, after)
    ):
        return True
    if is_of_others(before, after):
        return not is_added(before, after)
    return settled and _is_of_another_case(before, after)


def is_added(before: str, after: str) -> bool:
    """Return whether the verb of others gives one more answer, and by no mistake: `one could also choose B`."""
    return (
        _ADDED.search(before) is not None
        and is_of_others(before, after)
        and _MISTAKEN.search(before + after) is None
    )


def _is_of_another_case(before: str, after: str) -> bool:
    """Return whether an option is named under a condition: `for the minimum, the answer would be D`."""
    if (
        _ELSEWHERE.match(after)
        or _WOULD_DO.match(after)
        or _ANSWER_FOR.search(before)
        or _ANSWER_OF_ANYONE.search(before)
    ):
        return True
    if _COUNTERFACTUAL.search(_ARGUED.split(before)[-1]):
        return True
    if _QUESTIONS.search(before) or (_verb(before) and _ON_CONDITION.match(after)):
        return True
    if _LABEL.search(before) and _PREDICATE.match(after):
        return True
    prefix = _PREFIX.match(before)
    if prefix is None:
        return False
    return bool(prefix["about"] or _WAS.search(prefix[0]) or _WOULD_AFTER.match(after))


def is_of_others(before: str, after: str) -> bool:
    """Return whether the verb before an option is not the speaker's: `many pick B`, `choosing B would be hasty`."""
    found = _verb(before)
    if found is None:
        return False
    clauses = list(_CLAUSE_END.finditer(before, 0, found.start()))
    lead = before[clauses[-1].end() if clauses else 0 : found.start()]
    if (clauses and _TITLE.search(before, 0, clauses[-1].end())) or _CONSIDERED.search(lead):
        return True
    called = _GIVES.match(before, found.end(found.lastgroup or 0)) is not None
    who = last_match(_WHO, lead)
    if who is not None and called and who[0].lower() == "one":
        who = None
    if found["noun"] and (who is None or called or _NOUN_FOLLOWS.search(lead)):
        return False
    if _MISTAKEN.search(lead, who.end() if who is not None and who[0] in ("I", "we", "We") else 0):
        return True
    if who is not None:
        return who["speaker"] is None and (_OUGHT.search(lead) is None or _WHOEVER.search(lead) is not None)
    noun_like = (found["verb"] or "").lower().partition(" ")[0].endswith("ing") or _INFINITIVE.search(lead)
    if noun_like and not _GERUND_ENDS.match(after):
        return True
    if called and _NAMED.search(lead):
        return False
    return not (
        _ORDER.fullmatch(lead) or _LEADS.match(lead) or _OUGHT.search(lead) or _IDEOGRAPH.search(lead)
    )


def _verb(before: str) -> re.Match[str] | None:
    return _VERB.search(before, max(0, len(before) - CUE_CHARACTERS))


def _is_unlikely(before: str, after: str) -> bool:
    """Return whether the words around an option give it less than half of the odds."""
    behind = _PERCENT_BEHIND.match(after)
    if behind is not None and _ODDS.search(before):
        return float(behind["percent"]) < 50
    found = _PERCENT.search(before)
    return found is not None and float(found["percent"] or found["of"]) < 50
