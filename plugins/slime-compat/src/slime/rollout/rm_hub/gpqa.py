"""Multiple choice."""

from collections.abc import Mapping
from typing import Any

from slime_compat.views.samples.grading import score


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 where the response decides for the right option, else 0.0."""
    return score("gpqa", response, label, metadata)


__all__ = ["compute_gpqa_reward"]
