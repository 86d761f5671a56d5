"""The reward `exact`."""

from __future__ import annotations

from slime_core.sample import Sample

from slime_rm.labels import label_of


def exact(sample: Sample) -> float:
    """Return 1.0 when response and label are the same text, blanks at both ends aside, else 0.0.

    Raises:
        SampleError: the sample has no label.
    """
    return float(sample.response.strip() == label_of(sample).strip())
