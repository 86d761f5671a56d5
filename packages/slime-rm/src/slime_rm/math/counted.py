"""Whether words behind a number say what is counted or measured, and nothing else: `red marbles left`, `km/h`."""

from __future__ import annotations

import re

from slime_rm.math.answer.units import ADJECTIVES, named, read_unit

MAX_CHARACTERS = 80
"""Longest text that is read."""
MAX_WORDS = 7

_LETTER = r"[^\W\d_\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209f\u2150-\u218f]"
_PART = re.compile(rf"\s*(?:({_LETTER}+(?:[-'’]{_LETTER}+)*)\.?|(/|°|²|³|\^[23]|\^\{{[23]\}}))")
_DEGREES = frozenset(["°", "deg", "degree", "degrees"])
_SCALES = frozenset(["c", "f", "celsius", "fahrenheit"])
_POWERS = {"²": "^2", "³": "^3", "^{2}": "^2", "^{3}": "^3"}
#: Words that may end what is said of a number: "34 cookies left", "34 years old".
_TAILS = """
left total altogether overall remaining old long tall wide high deep each apart away sold saved spent earned made
eaten bought needed used picked baked collected planted daily weekly monthly yearly annually
"""
_IN_ALL = (["in", "total"], ["in", "all"], ["of", "age"], ["in", "length"], ["on", "average"])
_PREPOSITIONS = frozenset(["of", "in", "on", "for", "from", "per", "every", "each", "a", "an"])
_DETERMINERS = frozenset(["the", "a", "an", "each", "every", "his", "her", "their", "its", "my", "our"])
#: Adjectives, beside those of `answer.units`, and verbs and nouns used as such, that leave a number what it is.
_MORE_ADJECTIVES = """
more little orange gold golden silver long short tall fresh used baked fried
frozen canned stuffed colored coloured broken empty full square cubic swimming building coloring trading parking
wedding sewing running washing working winning matching living dining reading writing coin baseball basketball
football soccer tennis video phone paper ice hot apple oil school college high math science
"""
#: What is measured and may stand behind "of": "34 dollars of profit".
_MEASURED = """
profit income change revenue tax interest rent allowance time travel reading homework space land weight height length data
memory protein fat fiber carbs beef pork ham bacon turkey honey syrup jam pasta oats cotton clay coal sleep exercise practice training rest sunlight rain snow traffic
"""
#: Ends on -s and is no plural of what is counted, or is one that multiplies or divides.
_NO_PLURALS = """
always sometimes perhaps besides whereas towards afterwards upwards downwards backwards forwards regards thanks ours
theirs yours hers oops whoops alas plus minus times versus does says means equals exceeds seems looks appears fails
works needs varies remains depends differs changes becomes makes gives goes comes wants halves thirds quarters
fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths millionths tens ones hundreds thousands millions
billions trillions dozens scores grosses doubles triples quadruples percents percentages exponents
reciprocals inverses negatives opposites factorials guesses errors mistakes typos doubts corrections
estimates approximations maybes ifs buts hmms lies fails stops ends begins continues repeats increases decreases
rises falls drops doubts hopes thinks believes supposes assumes suggests contradicts cancels
unknowns noughts naughts halfs voids errs slips nulls flips reverses subtracts adds multiplies divides twos threes fours fives sixes sevens eights nines elevens twelves twenties
"""
#: Before a plural they change the number or leave it open: "34 before taxes", "34 estimated visitors".
_NO_MODIFIERS = """
before after below above beyond beside besides except minus plus less without with within under over against versus
than by via through during since until despite near about around like unlike upon onto into off out up down at to as
if when where while because although though given provided barring save bar pending or and but not nor no none never
both either neither so then this that these those it he she they we you who which what is are was were be been am has
have had do does did will would can could may might must shall should maybe perhaps possible possibly likely probable
approximate potential rough fake wrong false incorrect negative imaginary unknown virtual half double triple twice
quarter third fourth fifth tenth dozen score gross hundred thousand million billion trillion zero one two three four
five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety some any few many
several most fewer nope wait guess typo mistake error oops sorry hmm idk unsure uncertain invalid doubtful tentative
basis base mod modulo log sqrt root power squared cubed inverse reciprocal minimum maximum min max upper lower nearly almost
just only even still already once again instead rather else other another
"""


def says_what_is_counted(text: str) -> bool:
    """Return whether `text`, as it stands behind a number, names a unit or what is counted.

    Known are the units and counted things of `answer.units`; another word counts things when it is a plural on -s
    that is no verb and multiplies nothing. Adjectives may stand before it, one of them unknown. What may follow is
    `left`, `old`, `in total` and the like, or `of`, `in`, `per`, ... before another such thing.
    """
    words = _words(text)
    if words is None:
        return False
    if _is_unit(words):
        return True
    words, cut = _without_tails(words)
    if not words or _is_unit(words):
        return cut or bool(words)
    at = next((i for i, word in enumerate(words) if word in _PREPOSITIONS), len(words))
    behind = words[at + 1 :]
    if behind[:1] and behind[0] in _DETERMINERS:
        behind = behind[1:]
    if at < len(words) and not (_is_unit(behind) or _is_thing(behind, guess=False)):
        return False
    return at == 0 or _is_unit(words[:at]) or _is_thing(words[:at], guess=True)


def _words(text: str) -> list[str] | None:
    """Return words, `/`, `°` and powers; None where anything else stands there, or too much."""
    if len(text) > MAX_CHARACTERS:
        return None
    words: list[str] = []
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            return None
        sign = part[2]
        words.append(part[1] or _POWERS.get(sign, sign))
        at = part.end()
    return words if 0 < len(words) <= MAX_WORDS else None


def _is_unit(words: list[str]) -> bool:
    if words and words[0].lower() in _DEGREES:
        return len(words) == 1 or (len(words) == 2 and words[1].lower() in _SCALES)
    return bool(words) and words[0] != "/" and read_unit(words, trusted=False) is not None


def _without_tails(words: list[str]) -> tuple[list[str], bool]:
    before = len(words)
    while words:
        if [word.lower() for word in words[-2:]] in _IN_ALL:
            words = words[:-2]
        elif words[-1].lower() in _TAILS.split():
            words = words[:-1]
        else:
            break
    return words, len(words) < before


def _is_thing(words: list[str], *, guess: bool) -> bool:
    """Return whether `words` are adjectives before something that is counted; unknown words only where `guess`."""
    if not words:
        return False
    *modifiers, noun = words
    known = named(noun, trusted=False) is not None or (not guess and noun.lower() in _MEASURED.split())
    if not known and not (guess and _is_plural(noun.lower())):
        return False
    unknown = [word.lower() for word in modifiers if not _is_adjective(word)]
    return not unknown or (guess and len(unknown) == 1 and _may_modify(unknown[0]))


def _is_plural(word: str) -> bool:
    return (
        len(word) > 3
        and word.endswith("s")
        and not word.endswith(("ss", "us", "is", "ths", "'s", "’s", "ings"))
        and word not in _NO_PLURALS.split()
    )


def _is_adjective(word: str) -> bool:
    return word.lower() in ADJECTIVES or word.lower() in _MORE_ADJECTIVES.split()


def _may_modify(word: str) -> bool:
    return (
        len(word) > 2 and not word.endswith(("ly", "ing", "ed", "ths")) and word not in _NO_MODIFIERS.split()
    )
