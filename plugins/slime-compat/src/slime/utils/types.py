"""Samples."""

from typing import Any

from slime_compat.views.sample import ReferenceSample as Sample

#: Columns of a training batch by name.
RolloutBatch = dict[str, list[Any]]

__all__ = ["RolloutBatch", "Sample"]
