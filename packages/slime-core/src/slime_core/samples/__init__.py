"""Samples, and the batches that trainers get."""

from slime_core.samples.batch import Columns, TrainBatch, columns
from slime_core.samples.sample import Group, Sample
from slime_core.samples.status import STATUS_OF_FINISH, Status
from slime_core.samples.versions import VersionSpans

__all__ = [
    "STATUS_OF_FINISH",
    "Columns",
    "Group",
    "Sample",
    "Status",
    "TrainBatch",
    "VersionSpans",
    "columns",
]
