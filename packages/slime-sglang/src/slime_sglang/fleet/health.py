"""Health checks of one engine until it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slime_core.errors import DeadlineError, EngineError

from slime_sglang.engine import SglangEngine


async def watch(
    engine: SglangEngine,
    *,
    first_wait_s: float,
    interval_s: float,
    timeout_s: float,
    cleared: Callable[[], None],
) -> str:
    """Return why an engine is lost, as soon as it is: its server exited, or failed a health check.

    An engine whose `suspected` is set is checked at once.

    Args:
        engine: a started one.
        first_wait_s: until the first check, besides the interval.
        interval_s: between two checks.
        timeout_s: deadline of a check.
        cleared: called when an engine that was suspected has passed a check.
    """
    ended = asyncio.create_task(engine.ended())
    wait_s = first_wait_s + interval_s
    suspected = asyncio.create_task(engine.suspected.wait())
    try:
        while True:
            await asyncio.wait({ended, suspected}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return engine.failure or "its server ended"
            try:
                await engine.probe(timeout_s=timeout_s)
            except (EngineError, DeadlineError) as error:
                return engine.failure or f"it failed its health check: {error}"
            if engine.suspected.is_set():
                engine.suspected.clear()
                cleared()
                suspected = asyncio.create_task(engine.suspected.wait())
            wait_s = interval_s
    finally:
        ended.cancel()
        suspected.cancel()
