"""The smallest reward plugin."""

from slime_core.rewards.ending import without_special_tokens
from slime_core.samples import Sample


def ends_with_label(sample: Sample) -> float:
    """Return 1.0 when the response ends with the label, else 0.0."""
    if not sample.label:
        raise ValueError("the sample has no label; set --label-key")
    return float(without_special_tokens(sample.response).endswith(sample.label))
