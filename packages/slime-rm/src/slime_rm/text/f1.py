"""The reward `f1`: overlap of the words of response and label."""

from __future__ import annotations

import re
import string
from collections import Counter

from slime_core.errors import SampleError
from slime_core.rewards.ending import without_special_tokens
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_rm.text.labels import label_of
from slime_rm.text.thought import after_thought

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
#: Answers of which a part is no answer.
CLOSED = frozenset({"yes", "no", "noanswer"})


def f1(sample: Sample) -> Grade:
    """Score the overlap of the words of response and label: the harmonic mean of precision and recall.

    Case, punctuation, articles, special tokens at the end and a thought (`<think>...</think>`) before the answer do not count, the number of times that a word occurs does. Where either is
    `yes`, `no` or `noanswer`, only the very same is right. Parts: `precision`, `recall`.

    Raises:
        SampleError: the sample has no label, or one without words, such as an article.

    Source: SQuAD (arXiv:1606.05250) and HotpotQA's evaluation, as in slime/rollout/rm_hub/f1.py.
    """
    label = label_of(sample)
    given, wanted = normal_words(_answer(sample.response)), normal_words(label)
    if not wanted:
        raise SampleError(
            f"{sample.name}: label is {label[:200]!r}, which has no words once punctuation and articles are gone; "
            "wanted words (the reward `exact` compares text as it is)"
        )
    if given != wanted and ({" ".join(given)} | {" ".join(wanted)}) & CLOSED:
        return _grade(0.0, 0.0)
    if not given:
        return _grade(0.0, 0.0)
    shared = (Counter(given) & Counter(wanted)).total()
    return _grade(shared / len(given), shared / len(wanted))


def _answer(response: str) -> str:
    """Return what is behind the thought; nothing where that never ends."""
    return without_special_tokens(after_thought(response) or "")


def normal_words(text: str) -> list[str]:
    """Return the words of `text` in small letters, without punctuation and articles."""
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _grade(precision: float, recall: float) -> Grade:
    score = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return Grade(score=score, parts={"precision": precision, "recall": recall})
