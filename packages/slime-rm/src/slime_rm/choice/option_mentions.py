"""Finding where a text names options, sentence by sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from slime_rm.choice.option_cues import CORRECTION, OR_NONE, Role, role_of
from slime_rm.choice.option_text import BOX, TEXT

_AFTER_OPTION = (
    "or and because since as is are was were but not which where while given due for from with by at if unless except only "
    "also too fits matches works must would should can cannot could may might will has had does did seems looks appears "
    "gives holds states says fails violates contradicts over rather instead through to nor than vs versus remains wins it then beats being against"
)
_JOIN = re.compile(
    r"[\s,;/|&+)(\[\]\"'….*–—-]*(?:(?:or|and|and/or|xor|und|oder|et|ou|y|nor|through|thru|to|till|until|up to|plus|but also|as well as|along with|together with|either"
    r"|maybe|perhaps|possibly|probably|alternatively|otherwise|else|options?|choices?|answers?|letters?|versus|vs|then)\b[\s.,;/|&+()\[\]\"'–—-]*)*",
    re.IGNORECASE,
)
_TEXT_OF_LETTER = re.compile(r"[\s.):,=(\[–—-]*(?:which is |i\.?e\.?,? |namely |the )?", re.IGNORECASE)
_SINGULAR = re.compile(
    r"\s*(?:is|isn't|was|wasn't|has|hasn't|does|doesn't|fails|violates|contradicts|seems|looks)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(
    r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?:(?<=[.!?])[\"')\]]*|(?<=;)(?!\W*[A-Z]\b))\s+(?![^⟦]*⟧)"
)
_CONTINUED = re.compile(
    r"(\b(?:is|be|not|neither|nor|(?:wrong|incorrect|rejected|eliminated|excluded|ruled out|false)\s*:?)|n't)[ \t]*\n\s*",
    re.IGNORECASE,
)
#: Two options of a list, each with a remark: `B (Paris), C (London)`. What is said in a remark may be a verdict.
_REMARKED = re.compile(
    r"\s*(?:\(([^()\n]*)\)|[:–—-]\s+([^,;:()\n]+))\s*[,;]\s*(?:and|or)?\s*[(\[]?\s*", re.IGNORECASE
)
_REMARK = re.compile(rf"\s*[)\]]?\s*(?:\(([^()\n]*)\)|[:–—-]\s+([^,;:()\n]+))(?!{_SINGULAR.pattern})")
_VERDICT = re.compile(
    r"\b(?:not?|never|wrong|false|incorrect|right|true|correct|answer|best|worse|less|unlikely|impossible|out|rejected|eliminated|fails)\b|n't\b|[✓✔✅✗✘❌]",
    re.IGNORECASE,
)
_DENIES = re.compile(r"\b(?:not|neither|nor|never|no|none)\b|n't\b", re.IGNORECASE)
_OPENING = r"[\s\"'(\[<>–—-]*(?:(?:so|thus|therefore|hence|definitely|clearly|certainly|probably|(?:very |most |quite )?likely|almost certainly|in all (?:likelihood|probability)|presumably|evidently|obviously|surely|option|choice|letter|the|answer|both|either|it's|it is|ok|okay|sure|yes|final|correct|better)\b[\s,:]*)*"
_AFTER_OPENING = re.compile(
    r"\s*(?:[.):,;!–—\](→-]|(?:because|since|as|given|for|due|rather|instead|over|(?:but |and )?not|beats?|except|without|unlike|against)\b|$)"
)
_ENDS = re.compile(r"\s*(?:[.,;!]|$)")
_ROMAN = re.compile(r"\s*(?:,|and|or|&)\s*(?:II|III|IV|V|VI)\b|\s+only\b|\s*,\s*II")
_PART = re.compile(
    r"\b(?:(?:sub-?)?parts?|section|fig(?:ure|\.)?|table|appendix|panel)\s*\(?$", re.IGNORECASE
)
"""What stands before a letter that names a part of the question."""
_COMPARES = re.compile(r"\b(?:between|of|among|from)\s*$", re.IGNORECASE)
_TIGHT = "-/+*|."


@dataclass(frozen=True)
class Mention:
    """One option, where a sentence names it."""

    letter: str
    """Empty for a box that holds no option."""
    start: int
    end: int
    box: str | None = None
    """Content of the box, where it is one."""
    is_text: bool = False
    """Whether the option's text was found rather than its letter."""


@dataclass(frozen=True)
class Sentence:
    """A sentence and the options in it, in groups: those that stand in one list."""

    text: str
    start: int
    line: int
    number: int
    groups: tuple[tuple[Mention, ...], ...]
    listed: bool
    """Whether it is an entry of a list of options."""
    opens_line: bool
    """Whether it is the first of its line."""

    @property
    def is_question(self) -> bool:
        """Whether it asks."""
        return self.text.rstrip("\"') ").endswith("?")

    @property
    def is_bare(self) -> bool:
        """Whether it says nothing but options."""
        return len(self.groups) == 1 and not re.search(
            r"\w", self.text[: self.groups[0][0].start] + self.text[self.groups[0][-1].end :]
        )

    def opens_with(self, group: tuple[Mention, ...]) -> bool:
        """Return whether a group begins the sentence and stands there as an answer does, not as a word."""
        before, after = self.text[: group[0].start], self.text[group[-1].end :]
        bracketed = self.text[group[0].start] in "(["
        ends = (
            (_AFTER_OPENING if self.opens_line else _ENDS).match(after)
            or (bracketed and re.match(r"\s+[A-Z0-9⟪]", after))
            or self.is_bare
        )
        return group is self.groups[0] and bool(ends and re.fullmatch(_OPENING, before, re.IGNORECASE))

    def around(self) -> Iterator[tuple[tuple[Mention, ...], str, str]]:
        """Yield each group with the words before it, since the last, and after it, up to the next."""
        for i, group in enumerate(self.groups):
            begin = self.groups[i - 1][-1].end if i else 0
            end = self.groups[i + 1][0].start if i + 1 < len(self.groups) else len(self.text)
            yield group, self.text[begin : group[0].start], self.text[group[-1].end : end]


def sentences(text: str, letters: str) -> Iterator[Sentence]:
    """Yield the sentences of a text in plain writing, with the options that they name."""
    text = _with_capitals(_CONTINUED.sub(r"\1 ", text), letters)
    parts = [(i, part) for i, line in enumerate(text.split("\n")) for part in _parts(line, letters)]
    listed = _listed(parts, letters)
    start = number = line = 0
    for place, (i, part) in enumerate(parts):
        start, line = start + i - line, i
        opens_line = place == 0 or parts[place - 1][0] < i
        yield Sentence(part, start, i, number, _groups(part, letters), place in listed, opens_line)
        start += len(part)
        number += not part.rstrip().endswith(";")


def _parts(line: str, letters: str) -> list[str]:
    """Split a line into sentences; a letter alone, or the text of a letter, continues the sentence before it."""
    parts: list[str] = []
    alone = re.compile(rf"\W*\b[{letters}]\W*$|{TEXT[0]}.{TEXT[1]}\W*$")
    named = re.compile(rf"(?<!\w)(?:[{letters}]|{TEXT[0]}.{TEXT[1]})\W*$")
    labelled = re.compile(rf"(?<![\w{TEXT[0]}])[{letters}]\W*{TEXT[0]}$")
    end = 0
    for found in [*_SENTENCE_END.finditer(line), None]:
        part = line[end : found.end() if found is not None else len(line)]
        end += len(part)
        continues = (
            parts
            and ((alone.match(part) and named.search(parts[-1])) or labelled.search(parts[-1] + part[:1]))
            and not (_DENIES.search(parts[-1]) or parts[-1].rstrip().endswith("?"))
        )
        remark = parts and re.fullmatch(rf"\W*[{letters}]\.\s*", parts[-1]) and re.match("[a-z]", part)
        if continues or remark:
            parts[-1] += part
        elif part:
            parts.append(part)
    return parts


def _with_capitals(text: str, letters: str) -> str:
    """Write small letters as options where what stands around them shows that they are."""
    small = letters.lower().replace("i", "")
    bare = small.replace("a", "")
    if not small:
        return text

    def raised(found: re.Match[str]) -> str:
        return f"{found[1]}({found[2].upper()})"

    text = re.sub(
        rf"(?i:(\b(?:option|choice|letter)[ \t:]+[\"']?))((?:[{bare}])(?![\w'])|a(?=\s+(?:or|and)\b|\s*[/,|]))",
        raised,
        text,
    )
    text = re.sub(
        rf"(?i:(\b(?:answer|choice|option|solution)(?: is)?[ \t:=]+[\"']?))([{small}])(?=\s*(?:[.,;:)!\"'\n]|$|because|since))",
        raised,
        text,
    )
    return re.sub(
        rf"(?m)^([ \t\"']*)(?:([{small}])\)|([{bare}])(?=[.:]?[ \t\"']*$|\. ))",
        lambda found: f"{found[1]}({(found[2] or found[3]).upper()})",
        text,
    )


def _listed(parts: list[tuple[int, str]], letters: str) -> set[int]:
    """Return which sentences are entries of a list of options: `A. ...` beside `B. ...`."""
    entry = re.compile(
        rf"\s*[(\[]?([{letters}])[)\].:]+\s*(?!{_SINGULAR.pattern}|(?:are|can|would|could)\b)\S",
        re.IGNORECASE,
    )
    found: list[tuple[int, str]] = []
    for i, (line, part) in enumerate(parts):
        follows = parts[i + 1][1] if i + 1 < len(parts) and parts[i + 1][0] == line else ""
        if (match := entry.match(part + follows)) and match[1] in letters:
            found.append((i, match[1]))
    listed: set[int] = set()
    for (i, one), (j, other) in pairwise(found):
        if letters.index(other) == letters.index(one) + 1:
            listed |= {i, j}
    return listed


def _groups(text: str, letters: str) -> tuple[tuple[Mention, ...], ...]:
    groups: list[list[Mention]] = []
    for mention in _mentions(text, letters):
        last = groups[-1][-1] if groups else None
        between = text[last.end : mention.start] if last is not None else ""
        if last is not None and _joined(between, last, mention, text):
            groups[-1].append(mention)
        else:
            groups.append([mention])
    return tuple(tuple(part) for group in groups for part in _split(group, text))


def _joined(between: str, last: Mention, mention: Mention, text: str) -> bool:
    if mention.is_text != last.is_text and mention.box is None and _TEXT_OF_LETTER.fullmatch(between):
        return True
    if re.fullmatch(r"\s*to\s*", between) and re.search(
        r"\b(?:prefer\w*|superior|compared?|chang\w+|switch\w*|mov\w+)\b", text[: last.start], re.IGNORECASE
    ):
        return False
    return _JOIN.fullmatch(between) is not None or _both_remarked(between, text[mention.end :])


def _both_remarked(between: str, after: str) -> bool:
    """Return whether both options have remarks, of which neither judges."""
    remarks = _REMARKED.fullmatch(between), _REMARK.match(after)
    return all(found and not _VERDICT.search(found[1] or found[2]) for found in remarks)


def _split(group: list[Mention], text: str) -> Iterator[list[Mention]]:
    """Part the last of a list where what follows speaks of it alone: `the answer is A and B is wrong`."""
    parted = [i for i in range(1, len(group)) if ";" in text[group[i - 1].end : group[i].start]]
    if parted and re.match(r"\s*(?:are|is|were|was|can't|cannot|don't|do not)\b", text[group[-1].end :]):
        yield group[: parted[0]]
        group = group[parted[0] :]
    compared = len(group) > 2 and _COMPARES.search(text[: group[0].start]) is not None
    if len(group) > 1 and (compared or _SINGULAR.match(text, group[-1].end)):
        between = text[group[-2].end : group[-1].start].lower()
        again = group[-1].letter in {mention.letter for mention in group[:-1]}
        if not re.search(r"\b(?:or|nor|also)\b", between) and (len(group) > 2 if again else not compared):
            yield group[:-1]
            group = group[-1:]
    yield group


@lru_cache(maxsize=64)
def _pattern(letters: str) -> re.Pattern[str]:
    small = letters.lower().replace("i", "")
    return re.compile(
        rf"{BOX[0]}(?P<box>[^{BOX[1]}]*){BOX[1]}|{TEXT[0]}(?P<text>.){TEXT[1]}"
        rf"|(?<![\w\\])[(\[]\s?(?P<bracket>[{letters}{small}])\s?[)\]](?!\w)"
        rf"|(?<![\w'\\^°])(?P<bare>[{letters}])(?![\w'^_°])"
    )


def _mentions(text: str, letters: str) -> Iterator[Mention]:
    for found in _pattern(letters).finditer(text):
        start, end = found.span()
        if found["box"] is not None:
            for letter in _boxed(found["box"], letters) or [""]:
                yield Mention(letter, start, end, box=found["box"])
        elif found["text"]:
            yield Mention(found["text"], start, end, is_text=True)
        elif _PART.search(text, max(0, start - 12), start):
            continue
        elif found["bracket"]:
            yield Mention(found["bracket"].upper(), start, end)
        elif _is_option(text, start, letters):
            yield Mention(found["bare"], start, end)


def _boxed(content: str, letters: str) -> list[str]:
    """Return the options that a box names; none where it holds anything else."""
    small = letters.lower().replace("i", "")
    opening = r"[\s\"'(\[]*(?:(?:the|final|correct|answer|option|choice|letter|is|both|either|statement)\b[\s:]*)*[\s\"'(\[]*"
    content = re.sub(
        rf"^((?i:{opening}))([{small}])(?=[\s.):,\]\"']*$|[).:\]]\s*\S)",
        lambda found: found[1] + found[2].upper(),
        content.strip(),
    )
    groups = _groups(content, letters)
    if not groups or not re.fullmatch(opening, content[: groups[0][0].start], re.IGNORECASE):
        return []
    end = groups[0][-1].end
    behind = content[end:]
    if (
        not re.match(r"[\s.):,;\]\"'–—-]|$", behind)
        or re.match(r"\s*[=+*/^<>]", behind)
        or OR_NONE.match(behind)
    ):
        return []
    named = {mention.letter for mention in groups[0]}
    for group in groups[1:]:
        before, after = content[end : group[0].start], content[group[-1].end :]
        end = group[-1].end
        letters_here = {mention.letter for mention in group}
        if CORRECTION.search(before):
            named = letters_here
        elif role_of(before, after, content, decided=True) is Role.REJECTED:
            continue
        elif re.match(r"[.):]", after) or group[0].is_text:
            named |= letters_here
    return sorted(named)


def _is_option(text: str, at: int, letters: str) -> bool:
    """Return whether the capital at a place is an option: no article, pronoun, symbol, unit or part of a name."""
    before, letter, after = text[max(0, at - 40) : at], text[at], text[at + 1 : at + 41]
    if re.match(r"\s*=(?!>)(?!\s*⟪)", after) or re.search(
        r"\d\s$|(?<![-=<>])[<>≤≥]\s?$|(?<!\w)[A-Z]\s?=\s?$", before
    ):
        return False
    if (
        before[-1:] in _TIGHT
        and re.search(r"\w.$", before)
        and not re.search(rf"(?<!\w)[{letters}][)\]]?.$", before)
    ):
        return False
    if after[:1] in "-/+*|" and re.match(r".\w", after) and not re.match(rf".[(\[]?[{letters}](?!\w)", after):
        return False
    if letter == "I" and (_ROMAN.match(after) or re.search(r"\b(?:I|II|III|IV)\s*(?:,|and|or)\s*$", before)):
        return False
    if letter in "AI" and re.match(r"\s+[a-z]", after):
        words = "|".join(_AFTER_OPTION.split())
        return bool(re.match(rf"\s+(?:{words})\b", after)) and not (letter == "I" and _verb_of_speaker(after))
    return not (letter == "I" and re.match(r"['’]", after))


def _verb_of_speaker(after: str) -> bool:
    """Return whether `I` is the speaker: `I would`, not `I because`."""
    return (
        re.match(
            r"\s+(?:must|would|should|can|cannot|could|may|might|will|had|did|was|only|also|then|rather|too)\b",
            after,
        )
        is not None
    )
