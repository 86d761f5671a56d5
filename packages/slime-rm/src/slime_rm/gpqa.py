"""The reward `gpqa`."""

from __future__ import annotations

import string
from typing import Any

from slime_core.errors import SampleError
from slime_core.rewards.results import Grade
from slime_core.sample import Sample

from slime_rm.choice import chosen_letter
from slime_rm.f1 import normal_words
from slime_rm.multiple_choice import grade_letter

TAIL_CHARACTERS = 300
"""Where the text of an option is looked for when no letter is chosen: this many characters at the end."""


def gpqa(sample: Sample) -> Grade:
    """Score 1.0 when the response chooses the correct option, by its letter or else by its text; else 0.0.

    Metadata, all optional: `choices` (texts of the options, in order), `valid_letters`, `correct_letter`,
    `correct_answer` or `answer_text` (text of the correct option). What they leave open follows from the label: a
    letter is the correct letter, anything else the correct text. A text counts when the end of the response holds
    all its words in a row, and those of no other choice.

    Raises:
        SampleError: neither metadata nor label say what is correct, or they contradict each other.

    Source: slime/rollout/rm_hub/gpqa.py, from which we differ in never looking for a letter inside words, in
    reading "answer is definitely B" as B, and in giving 0.0 to a response that names several options.
    """
    choices = _choices(sample)
    letters = _letters(sample, choices)
    letter, text = _correct(sample, letters, choices)
    chosen = chosen_letter(sample.response, letters)
    if chosen is not None and letter is not None:
        return grade_letter(chosen, letter)
    if text is None:
        return grade_letter(None, letter or "")
    ending = " ".join(normal_words(sample.response[-TAIL_CHARACTERS:]))
    others = [choice for choice in choices if normal_words(choice) != normal_words(text)]
    if _holds(ending, text) and not any(_holds(ending, other) for other in others if not _holds(text, other)):
        return Grade(score=1.0, details={"answer": text, "why": "text of the option"})
    return grade_letter(None, letter or "")


def _choices(sample: Sample) -> list[str]:
    choices: Any = sample.metadata.get("choices") or []
    if isinstance(choices, dict):
        choices = list(choices.values())
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise SampleError(f"{sample.name}: metadata['choices'] is {choices!r}; wanted a list of texts")
    return choices


def _letters(sample: Sample, choices: list[str]) -> str:
    default = string.ascii_uppercase[: len(choices) or 10]
    letters = "".join(sample.metadata.get("valid_letters") or default).upper()
    if not letters.isalpha() or not letters.isascii():
        raise SampleError(f"{sample.name}: metadata['valid_letters'] is {letters!r}; wanted letters")
    return letters


def _correct(sample: Sample, letters: str, choices: list[str]) -> tuple[str | None, str | None]:
    """Return the correct letter and the correct text, at least one of them."""
    letter = str(sample.metadata.get("correct_letter") or "").strip().upper() or None
    text = sample.metadata.get("correct_answer") or sample.metadata.get("answer_text")
    label = (sample.label or "").strip()
    bare = label.strip("().:").upper()
    if len(bare) == 1 and bare in string.ascii_uppercase:
        letter = letter or bare
    elif label:
        text = text or label
    if letter is None and text is not None and choices:
        same = [i for i, choice in enumerate(choices) if normal_words(choice) == normal_words(text)]
        letter = letters[same[0]] if len(same) == 1 and same[0] < len(letters) else None
    if text is None and letter is not None and letter in letters[: len(choices)]:
        text = choices[letters.index(letter)]
    if letter is not None and letter not in letters:
        raise SampleError(f"{sample.name}: the correct letter is {letter!r}; wanted one of {letters}")
    if letter is None and text is None:
        raise SampleError(
            f"{sample.name}: label is {sample.label!r} and metadata has neither correct_letter nor correct_answer; "
            "wanted one of them"
        )
    return letter, text if text is None or normal_words(text) else None


def _holds(ending: str, text: str) -> bool:
    """Return whether all words of `text` are in `ending`, in a row; one letter or none is no text."""
    wanted = " ".join(normal_words(text))
    return len(wanted) > 1 and f" {wanted} " in f" {' '.join(normal_words(ending))} "
