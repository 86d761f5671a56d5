"""Weights for engines that come back without any, while the loop waits for what they generate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from slime_core.protocols import AsksForWeights, RolloutEngine


async def supplied[T](
    work: Awaitable[T], engine: RolloutEngine, *, version: int, send: Callable[[], Awaitable[None]]
) -> T:
    """Await work of the engine, and send it weights whenever it asks for them meanwhile.

    Args:
        work: which the loop waits for, so that the trainer is free; cancelled where sending fails.
        engine: that works.
        version: of the trainer's weights.
        send: sends them, under a deadline of its own.

    Raises:
        WeightSyncError: what `send` raises, or the work.
    """
    if not engine.capabilities.asks_for_weights:
        return await work
    asking = cast("AsksForWeights", engine)
    working = asyncio.ensure_future(work)
    wanted: asyncio.Future[None] | None = None
    try:
        while not working.done():
            wanted = asyncio.ensure_future(asking.weights_wanted(str(version)))
            await asyncio.wait({working, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                wanted.result()
                if not working.done():
                    await send()
        return working.result()
    finally:
        left = {one for one in (working, wanted) if one is not None}
        for one in left:
            one.cancel()
        await asyncio.wait(left)
