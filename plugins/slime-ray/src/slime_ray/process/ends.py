"""Waiting for processes of this machine to be gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from slime_core.runtime.processes.tree import has_ended

_POLL_S = 0.02


async def still_running(pids: Sequence[int], seconds: float) -> list[int]:
    """Wait until none of the processes runs, at most so long; return those that do."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not all(map(has_ended, pids)):
                await asyncio.sleep(_POLL_S)
    return [pid for pid in pids if not has_ended(pid)]
