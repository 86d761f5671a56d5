"""A run that is asked to end: blocks that are not cut short end first, and none begins any more."""

from __future__ import annotations

import asyncio
import signal

import pytest
from slime_core.errors import Interrupted
from slime_core.runtime.stop import Stop


def test_of_two_blocks_that_are_not_cut_short_the_one_under_way_ends_and_the_next_does_not_begin():
    done = []

    async def main() -> None:
        stop = Stop()

        async def steps() -> None:
            with stop.held():
                stop.ask(Interrupted(signal.SIGTERM))
                await asyncio.sleep(0)
                done.append("the first ends")
            with stop.held():
                done.append("the second begins")
                await asyncio.sleep(0)

        with pytest.raises(Interrupted):
            await stop.obey("the steps", steps())
        with stop.held():  # what is saved afterwards is not
            done.append("what was done is saved")

    asyncio.run(main())
    assert done == ["the first ends", "what was done is saved"]
