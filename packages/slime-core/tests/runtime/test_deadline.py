"""Deadlines: what is left of work that is done."""

from __future__ import annotations

import asyncio
import gc
import weakref

from slime_core.runtime.deadline import within


class Groups:
    """Something that can be referred to weakly, as no list can."""


def test_nothing_keeps_the_result_of_work_that_is_done():
    async def made():
        await asyncio.sleep(0)
        return Groups()

    async def is_kept():
        groups = await within(60.0, "work", made())
        left = weakref.ref(groups)
        del groups
        await asyncio.sleep(0)
        return left() is not None

    gc.disable()
    try:
        assert not asyncio.run(is_kept())
    finally:
        gc.enable()
