"""The clock of a run: that of its event loop, which a simulation replaces."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Return the time of the running event loop, seconds; outside of one the monotonic clock, which loops show unless virtual."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
