"""`Status`: the state of a sample, from pending to completed, truncated, aborted or failed."""

from __future__ import annotations

import enum


class Status(enum.StrEnum):
    """State of a sample. Only COMPLETED and TRUNCATED samples may be trained on."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


#: The status that each engine finish reason leads to.
STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
