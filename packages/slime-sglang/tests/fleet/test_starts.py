"""Starts of engines in the place of lost ones: when, how long they are waited for, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import errno
import os
from functools import partial

import pytest

from ..fake_fleet import WATCHED, generate_all, right, until

pytestmark = pytest.mark.timeout(120)


async def lose(engine, worker, replica):
    """Have a worker end, and its replica find out."""
    await worker.stop()
    replica.engine.suspected.set()
    await until(lambda: replica.state == "starting")


def test_while_the_trainer_has_the_devices_no_engine_is_started_there(fleet_of):
    async def scenario(engine, first, second, third):
        replica = engine._replicas[0]
        await engine.offload()
        await lose(engine, first, replica)
        await asyncio.sleep(0.3)
        assert third.asked == []
        await engine.onload()
        await until(lambda: replica.state == "serving")
        assert right(await generate_all(engine))
        assert third.answered

    fleet_of(scenario, spare=True, **WATCHED)


@pytest.mark.parametrize(("restarts", "state"), [(1, "gone"), (2, "serving")])
def test_the_trainer_waits_for_an_engine_that_is_starting_and_one_that_takes_long_has_failed_to_start(
    fleet_of, restarts, state
):
    async def scenario(engine, first, second, third):
        replica = engine._replicas[0]
        third.faults["/health"] = 503  # it is not ready
        await lose(engine, first, replica)
        await until(lambda: third.asked)
        holding = asyncio.create_task(engine._supervisor.hold_starts(0.5))
        await asyncio.sleep(0.2)
        assert not holding.done()
        ended = replica.engine
        await holding
        assert ended._client is None  # nothing of it is left
        third.faults.clear()
        asked = len(third.asked)
        await asyncio.sleep(0.3)
        assert len(third.asked) == asked
        engine._supervisor.allow_starts()
        await until(lambda: replica.state != "starting")
        assert "it was still starting" in replica.reason
        return replica.state

    assert fleet_of(scenario, spare=True, restarts=restarts, **WATCHED) == state


def test_an_engine_that_cannot_be_made_or_started_for_whatever_reason_is_one_more_failed_start(fleet_of):
    async def scenario(engine, first, second, third):
        replica = engine._replicas[0]
        make = replica._make

        def made(before):
            if before == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            one = make(before)
            if before == 2:
                one._server.start = partial(os.fsencode, 0)  # raises a TypeError
            return one

        replica._make = made
        await first.stop()
        replica.engine.suspected.set()
        await until(lambda: replica.reason and replica.state == "serving")
        assert right(await generate_all(engine))
        return replica.reason

    assert fleet_of(scenario, spare=True, restarts=3, **WATCHED).startswith("TypeError: ")
