"""Settings of the launcher `ray`. How many ranks there are is core's section `cluster`."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt
from slime_core.config.base import SectionModel


class RaySection(SectionModel):
    """Ranks as Ray actors (`--launcher ray`)."""

    start_timeout_s: Annotated[float, Gt(0)] = 600
    """Deadline of the start, seconds: machines that are free, processes, and the model on every rank."""
