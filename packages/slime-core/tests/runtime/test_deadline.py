"""Deadlines: what is left of work that is done."""

from __future__ import annotations

import asyncio
import gc
import weakref

from slime_core.runtime.deadline import seconds_left, within


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


def test_work_is_told_how_long_it_has_until_the_nearest_of_its_deadlines():
    async def left():
        return seconds_left()

    async def nested(outer, inner):
        return await within(outer, "outer", within(inner, "inner", left()))

    async def main():
        first, second = await nested(500.0, 100.0), await nested(100.0, 500.0)
        return first, second, seconds_left()

    first, second, outside = asyncio.run(main())
    assert 50 < first <= 100 and 50 < second <= 100
    assert outside is None
