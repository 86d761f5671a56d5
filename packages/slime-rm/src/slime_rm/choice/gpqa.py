"""The reward `gpqa`: multiple choice, where the text of an option stands for its letter too."""

from __future__ import annotations

import re
import string
from typing import Any

from slime_core.errors import SampleError
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_rm.choice.decision import Decision, decide
from slime_rm.choice.multiple_choice import grade_decision
from slime_rm.choice.option_text import plain
from slime_rm.choice.stated_text import states_text

_SEVERAL = re.compile(r"[\W_]*[A-J](?:(?:[\W_]|and|or)+[A-J])+[\W_]*", re.IGNORECASE)
_UNKNOWN = "?"
"""Letter of the correct text where the data do not say which option it is."""
_NOT_ALONE = "has the text of the answer beside more; what else it names may be other options: metadata['choices'] tells"


def gpqa(sample: Sample) -> Grade:
    """Score 1.0 when the response decides for the correct option, by its letter or its text (`choice.decide`), else 0.0.

    Metadata, all optional: `choices` (texts of the options in order, or by letter), `valid_letters`, `correct_letter`,
    `correct_answer` or `answer_text` (text of the correct option). What they leave open follows from the label: a
    letter, the text of the correct option, or, where there are `choices` or `valid_letters`, the number of the correct
    option, from 0. Without choices any other label is the correct text.

    Without choices nobody knows what else is an option, so that the correct text has to stand alone: at the end of the
    response, or in its last box (`stated_text.states_text`). A response that lists them all is refused.

    Raises:
        SampleError: label and metadata do not say what is correct, contradict each other, name an option that there is
            not, several, or one that can be read in two ways.

    Source: slime/rollout/rm_hub/gpqa.py, also for numbers from 0, from which we differ in never looking for a letter
    inside words, in reading "answer is definitely B" as B, in giving 0.0 to a response that names several options, and
    in refusing data that say nothing, or two things (there 0.0, or the first of them).
    """
    choices, letters = _options(sample)
    letter, text = _correct(sample, letters, choices)
    texts = dict(zip(letters, choices, strict=False))
    if text is not None:
        texts[letter or _UNKNOWN] = texts.get(letter or _UNKNOWN, text)
    decision = decide(sample.response, letters, texts)
    if texts and not choices and text is not None and not states_text(sample.response, text):
        by_letter = decide(sample.response, letters)
        if decision.letter == (letter or _UNKNOWN) != by_letter.letter:
            by_letter = Decision(by_letter.letter, _NOT_ALONE)
        decision = by_letter
    graded = grade_decision(decision, letter or _UNKNOWN)
    if letter is None and decision.letter is not None and decision.letter != _UNKNOWN:
        why = "names a letter; without choices or correct_letter only the text of the answer counts"
        return Grade(score=0.0, details={"answer": decision.letter, "why": why})
    return graded


def _options(sample: Sample) -> tuple[list[str], str]:
    """Return the texts of the options and their letters."""
    choices: Any = sample.metadata.get("choices") or []
    given: Any = sample.metadata.get("valid_letters") or []
    if isinstance(choices, dict):
        if not given and all(isinstance(key, str) and len(key) == 1 for key in choices):
            given = list(choices)
        choices = list(choices.values())
    if not isinstance(choices, list) or not all(
        (isinstance(choice, str) and plain(choice)) or _is_number(choice) for choice in choices
    ):
        raise SampleError(f"{sample.name}: metadata['choices'] is {choices!r}; wanted a list of texts")
    if not isinstance(given, str | list) or not all(isinstance(letter, str) for letter in given):
        raise SampleError(f"{sample.name}: metadata['valid_letters'] is {given!r}; wanted letters")
    letters = "".join(given).upper() or string.ascii_uppercase[: len(choices) or 10]
    if not letters.isalpha() or not letters.isascii() or len(set(letters)) < len(letters):
        raise SampleError(
            f"{sample.name}: metadata['valid_letters'] is {letters!r}; wanted letters, each once"
        )
    if len(choices) > len(letters):
        raise SampleError(
            f"{sample.name}: metadata has {len(choices)} choices and {len(letters)} letters, {letters}; "
            "wanted a letter for each choice"
        )
    return [str(choice) for choice in choices], letters


def _correct(sample: Sample, letters: str, choices: list[str]) -> tuple[str | None, str | None]:
    """Return the letter and the text of the correct option, at least one of them."""
    usable = letters[: len(choices)] if choices else letters
    text = sample.metadata.get("correct_answer") or sample.metadata.get("answer_text")
    named = sample.metadata.get("correct_letter")
    known = {f"metadata['correct_letter'] {named!r}": _letter(sample, named, usable)} if named else {}
    if text is not None:
        if not isinstance(text, str) and not _is_number(text):
            raise SampleError(f"{sample.name}: the correct answer in metadata is {text!r}; wanted a text")
        text = str(text)
        at = _place(sample, text, usable, choices)
        if at is None and choices and not known:
            raise SampleError(f"{sample.name}: the correct answer {text!r} is in no choice of {choices}")
        known |= {f"the correct answer {text!r}": at} if at is not None else {}
    label = (sample.label or "").strip()
    if label:
        at, as_text = _of_label(sample, label, usable, choices, explicit=bool(known) or text is not None)
        known |= {f"label {label!r}": at} if at is not None else {}
        text = text or as_text
    if len(set(known.values())) > 1:
        found = ", ".join(f"{where} is {letter}" for where, letter in known.items())
        raise SampleError(f"{sample.name}: {found}; wanted one correct option")
    if not known and text is None:
        raise SampleError(
            f"{sample.name}: label is {sample.label!r} and metadata has neither correct_letter nor correct_answer; "
            "wanted one of them"
        )
    return next(iter(known.values()), None), text


def _letter(sample: Sample, named: Any, usable: str) -> str:
    letter = named.strip().strip("().:").upper() if isinstance(named, str) else ""
    if len(letter) != 1 or letter not in usable:
        raise SampleError(f"{sample.name}: the correct letter is {named!r}; wanted one of {usable}")
    return letter


def _of_label(
    sample: Sample, label: str, usable: str, choices: list[str], *, explicit: bool
) -> tuple[str | None, str | None]:
    """Return the letter that a label means, or else the text; neither where metadata say it and the label does not.

    Raises:
        SampleError: it is no option, several, or may be two.
    """
    bare = label.strip("().:").upper()
    numbered = bool(choices) or bool(sample.metadata.get("valid_letters"))
    readings = {
        "as a letter": bare if len(bare) == 1 and bare in usable else None,
        "as a text": _place(sample, label, usable, choices),
        "as a number from 0": usable[int(label)]
        if numbered and re.fullmatch(r"\d{1,2}", label, re.ASCII) and int(label) < len(usable)
        else None,
    }
    meant = {how: letter for how, letter in readings.items() if letter is not None}
    if readings["as a letter"] is not None:
        return readings["as a letter"], None
    if len(set(meant.values())) > 1:
        found = " and ".join(f"{letter} {how}" for how, letter in meant.items())
        raise SampleError(f"{sample.name}: label is {label!r}, which is {found}; write the letter")
    if meant:
        return next(iter(meant.values())), None
    if explicit:
        return None, None
    if choices:
        raise SampleError(
            f"{sample.name}: label is {label[:200]!r}, which is in no choice of {choices}; wanted one of the letters "
            f"{usable}, the text of a choice, or its number from 0"
        )
    if len(bare) == 1 or _SEVERAL.fullmatch(label) or label[:1] in "[{" or not plain(label):
        raise SampleError(
            f"{sample.name}: label is {label[:200]!r}; wanted one of the letters {usable}, or the text of one answer; "
            "a number needs metadata['choices'] or metadata['valid_letters']"
        )
    return None, label


def _place(sample: Sample, text: str, usable: str, choices: list[str]) -> str | None:
    """Return the letter of the choice that is `text`."""
    for fold in (_same, lambda text: _same(text).lower()):
        same = [letter for letter, choice in zip(usable, choices, strict=False) if fold(choice) == fold(text)]
        if len(same) == 1:
            return same[0]
    if same:
        raise SampleError(
            f"{sample.name}: {text!r} is the text of the choices {', '.join(same)}; wanted it once"
        )
    return None


def _same(text: str) -> str:
    return " ".join(plain(text).strip(" .;").split())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
