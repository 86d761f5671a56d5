"""`label_of`: the label of a sample, or an error that names it."""

from __future__ import annotations

from slime_core.errors import SampleError
from slime_core.samples import Sample


def label_of(sample: Sample) -> str:
    """Return the label.

    Raises:
        SampleError: there is none, or it is blank; names the sample.
    """
    if sample.label is None or not sample.label.strip():
        raise SampleError(
            f"{sample.name}: label is {sample.label!r}, wanted the ground truth; "
            "set --label-key to the column that holds it"
        )
    return sample.label
