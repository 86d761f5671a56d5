"""Instructions that can be checked."""

from collections.abc import Mapping
from typing import Any

from slime_compat.views.samples.grading import score


def compute_ifbench_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 where a response follows all instructions of the metadata, else 0.0."""
    return score("ifbench", response, label, metadata)


__all__ = ["compute_ifbench_reward"]
