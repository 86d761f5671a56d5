"""The reward `exact`: whether response and label are the same text."""

from __future__ import annotations

from slime_core.rewards.ending import without_special_tokens
from slime_core.samples import Sample

from slime_rm.text.labels import label_of
from slime_rm.text.thought import after_thought


def exact(sample: Sample) -> float:
    """Return 1.0 when response and label are the same text, blanks at both ends aside, else 0.0.

    Special tokens at the end of the response (`ending.without_special_tokens`), and a thought (`<think>...</think>`) before the answer, do
    not count, unless the label has them.

    Raises:
        SampleError: the sample has no label.
    """
    wanted, answer = label_of(sample).strip(), after_thought(sample.response) or ""
    forms = (sample.response, without_special_tokens(sample.response), answer, without_special_tokens(answer))
    return float(wanted in {form.strip() for form in forms})
