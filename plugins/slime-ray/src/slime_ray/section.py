"""Settings of the launcher `ray`. How many ranks there are is core's section `cluster`."""

from __future__ import annotations

from slime_core.config.base import Seconds, SectionModel


class RaySection(SectionModel):
    """Ranks as Ray actors (`--launcher ray`)."""

    start_timeout_s: Seconds = 600
    """Deadline of the start, seconds: machines that are free, processes, and the model on every rank."""
