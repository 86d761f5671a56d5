"""`decide`: the option that a response decides for, one letter, or none and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_rm.choice.option_cues import CORRECTION, REASONS, Role, role_of, without_predicate
from slime_rm.choice.option_mentions import Mention, Sentence, sentences
from slime_rm.choice.option_remarks import is_remark
from slime_rm.choice.option_text import plain_response, with_marked_texts
from slime_rm.text.thought import thought_never_ends

_ENDS = re.compile(r"\s*(?:[.,;!)\]]|$)")
_TAKEN_BACK = re.compile(
    r"\b(?:wrong|not right|not correct|incorrect|mistake|isn't right|can't be|scratch that|never ?mind|strike that)\b",
    re.IGNORECASE,
)
_ENDS_SENTENCE = re.compile(r"\s*(?:[.!]\s*)?$|\s*,?\s*(?:because|since|as|not)\b", re.IGNORECASE)
_REMARK = re.compile(r"[)\]]?\s*(?:[:→⇒=]|[–—-]+>?)>?\s*\w|[)\]]\.?\s+[a-z]{2}|\.\s+[a-z]{2}|\s\(\s*[a-z]{2}")
"""What follows an option that opens a line and is only spoken of there: `B: too large`."""
_OPTION_TEXT = re.compile(r"\W*(?:both|all|neither|none|only|either)\b", re.IGNORECASE)
_RIVAL = re.compile(r"(?:[,;/|(]|\b(?:or|and))\s*$", re.IGNORECASE)
_TEXTS_CHARACTERS = 300
"""Where the text of an option decides without any word that says so: this many characters at the end."""


@dataclass(frozen=True)
class Decision:
    """What a response decides for."""

    letter: str | None
    """The option; None where it decides for none."""
    why: str
    """For people: what a response without a decision does instead."""


@dataclass
class _Reading:
    """What has been decided so far, read from the beginning to the end."""

    chosen: frozenset[str] = frozenset()
    strength: int = 0
    possible: frozenset[str] = frozenset()
    corrected: bool = False
    place: tuple[int, int] = (-1, -1)
    """Line and sentence of the decision."""
    alone: bool = False
    """Whether it is all that its line says."""
    why: str = "decides for no option"
    texts: list[tuple[int, str, Role]] = field(default_factory=list)


def decide(response: str, letters: str, texts: Mapping[str, str] | None = None) -> Decision:
    r"""Return the option among `letters` that the response decides for.

    What is read is the end of the response, after the thought; nothing where that never ends. Options are letters, capitals but where brackets, a box or
    a word such as "option" show that a small one is meant (never `i`); and, where `texts` gives them by letter, their
    texts. The last decision counts: a `\boxed{...}` before what is given as the answer, alone on a line, or called
    correct, and that before what follows from an argument. A weaker or an equal one after it takes its place only with a
    word such as "wait"; without, it contradicts it. Alternatives, lists and ranges are no decision, nor is what is
    rejected, compared unfavourably or asked. `A` before a word in small letters is an article, `I` a pronoun.

    Args:
        response: as generated, special tokens and all.
        letters: the options that there are, capitals.
        texts: text of the option of each letter; a letter that stands in no `letters` names the option of unknown letter.
    """
    if thought_never_ends(response):
        return Decision(None, "was cut off while it thought: its thought never ends")
    plain = plain_response(response)
    marked = with_marked_texts(plain, texts or {})
    reading = _Reading()
    for sentence in sentences(marked, letters):
        _read(reading, sentence, letters, len(marked))
    if reading.chosen:
        return _one_of(reading.chosen, "names several options")
    if reading.possible:
        return _one_of(reading.possible, "names several options")
    final = {letter for _, letter, role in reading.texts if role is not Role.REJECTED}
    if len(final) == 1 and reading.strength == 0:
        return Decision(final.pop(), "text of the option")
    return Decision(None, reading.why)


def _one_of(letters: frozenset[str], otherwise: str) -> Decision:
    if len(letters) == 1:
        return Decision(next(iter(letters)), "decided")
    return Decision(None, f"{otherwise}: {', '.join(sorted(letters))}")


def _read(reading: _Reading, sentence: Sentence, letters: str, length: int) -> None:
    """Take in one sentence."""
    decided = reasons = False
    if not sentence.groups and CORRECTION.search(sentence.text):
        reading.corrected = True
        if reading.chosen and _TAKEN_BACK.search(sentence.text):
            reading.chosen, reading.strength, reading.why = frozenset(), 0, "takes its decision back"
    for group, before, after in sentence.around():
        box = next((mention.box for mention in group if mention.box is not None), None)
        named = frozenset(mention.letter for mention in group) - {""}
        corrects = CORRECTION.search(before) is not None
        if group is not sentence.groups[0]:
            before = without_predicate(before)
        upto = sentence.text[: group[0].start]
        settled = reading.strength >= Role.CORRECT and not (decided or corrects or reading.corrected)
        remark = is_remark(before, after, settled=settled and box is None)
        reading.corrected |= corrects and not remark
        if sentence.is_question and box is None:
            continue
        in_brackets = (
            group is sentence.groups[0] and len(group) == 1 and sentence.text[group[0].start] in "(["
        )
        role = role_of(
            before,
            after,
            upto,
            decided=decided,
            behind_value=in_brackets and _ENDS_SENTENCE.match(after) is not None,
        )
        if remark and role is not Role.REJECTED:
            continue
        reasons = decided and (reasons or REASONS.search(before) is not None)
        if reasons and role > Role.NAMED and not (reading.corrected or re.search(r"\bor\W*$", before)):
            role = Role.NAMED
        role = _in_place(role, sentence, group, before, after, reading)
        texts = [
            mention
            for mention in group
            if mention.is_text and length - sentence.start - mention.end < _TEXTS_CHARACTERS
        ]
        reading.texts += [(sentence.line, mention.letter, role) for mention in texts]
        if box is not None and role is Role.POSSIBLE and named and reading.chosen:
            reading.chosen |= named
        elif box is not None and role is not Role.REJECTED:
            _decide(reading, named, Role.ANSWERED + 1, sentence, alone=False)
            if not named:
                reading.why, reading.strength = f"its last box holds no option: {box[:40]!r}", 0
                reading.possible, reading.texts = frozenset(), []
        elif role is Role.REJECTED:
            _reject(reading, named)
        elif role is Role.POSSIBLE:
            if reading.chosen:
                reading.chosen |= named
            else:
                reading.possible |= named
        elif role is not Role.NAMED:
            _decide(reading, named, role, sentence, alone=sentence.is_bare)
        decided = decided or role >= Role.CORRECT


def _in_place(
    role: Role, sentence: Sentence, group: tuple[Mention, ...], before: str, after: str, reading: _Reading
) -> Role:
    """Return the role that a group's place gives it: alone on a line, first on it, or a rival of what was just chosen."""
    follows = reading.chosen and reading.place == (sentence.line, sentence.number - 1)
    if follows and _OPTION_TEXT.match(sentence.text) and _ENDS.match(after):
        return min(role, Role.NAMED) if role is not Role.CORRECT else role
    settled = reading.strength >= Role.CORRECT and not reading.corrected
    if settled and sentence.opens_line and sentence.opens_with(group) and _REMARK.match(after):
        return Role.NAMED
    if (
        role in (Role.NAMED, Role.IMPLIED, Role.POSSIBLE)
        and sentence.opens_with(group)
        and not sentence.listed
    ):
        return Role.ANSWERED if len({mention.letter for mention in group}) == 1 else Role.POSSIBLE
    restarts = (not reading.chosen and before.rstrip().endswith(";")) or (
        reading.corrected and re.search(r"\bto\W*$", before)
    )
    if role in (Role.NAMED, Role.IMPLIED) and _ENDS.match(after) and (CORRECTION.search(before) or restarts):
        return Role.ANSWERED
    same_line = reading.chosen and reading.place[0] == sentence.line
    if role is Role.NAMED and same_line and _RIVAL.search(before) and _ENDS.match(after):
        return Role.POSSIBLE
    return role


def _decide(
    reading: _Reading, named: frozenset[str], strength: int, sentence: Sentence, *, alone: bool
) -> None:
    """Take a decision in: it replaces an earlier one, or contradicts it."""
    place = (sentence.line, sentence.number)
    lines_in_a_row = alone and reading.alone and place[0] == reading.place[0] + 1
    beside = place == reading.place or lines_in_a_row
    if reading.chosen and not reading.corrected and named != reading.chosen and strength >= Role.CORRECT:
        if (
            reading.strength == Role.IMPLIED
            or (strength >= reading.strength and not beside)
            or strength > reading.strength
        ):
            reading.chosen = named
        else:
            reading.chosen |= named
    elif reading.corrected or strength >= reading.strength:
        reading.chosen = named
    else:
        return
    reading.strength = strength if reading.corrected else max(strength, reading.strength)
    reading.corrected, reading.place, reading.alone = False, place, alone
    reading.possible = frozenset()


def _reject(reading: _Reading, named: frozenset[str]) -> None:
    reading.possible -= named
    if reading.chosen & named and (reading.corrected or reading.strength <= Role.IMPLIED):
        reading.chosen -= named
        reading.strength = 0 if not reading.chosen else reading.strength
        reading.why = "rejects what it decided for"
    elif not reading.chosen:
        reading.why = f"rejects {', '.join(sorted(named))} and decides for no option"
