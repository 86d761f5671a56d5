"""Weight sync: both sides under one deadline, and an error of either is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from slime_core.errors import DeadlineError, WeightSyncError
from slime_core.weights import sync_weights


def side(action, **more):
    """Return a trainer or an engine whose part of the update is `action`."""

    async def run(plan):
        return await action()

    async def open_update(transport, version):
        return SimpleNamespace(transport=transport, version=version)

    return SimpleNamespace(transports=("memory",), send=run, receive=run, open_update=open_update, **more)


def sync(send, receive, *, timeout_s=30.0):
    return asyncio.run(sync_weights(side(send), side(receive), version="7", timeout_s=timeout_s))


async def agree():
    return {"w": 1}


def test_a_side_that_waits_is_cancelled_when_the_other_fails():
    cancelled = []

    async def wait():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def refuse():
        raise WeightSyncError("w: wrong shape")

    with pytest.raises(WeightSyncError, match="w: wrong shape"):
        sync(wait, refuse)
    assert cancelled == [True]


def test_failures_of_both_sides_are_told():
    async def refuse():
        raise WeightSyncError("w: wrong shape")

    async def break_down():
        raise OSError("pipe closed")

    with pytest.raises(WeightSyncError, match="w: wrong shape") as caught:
        sync(refuse, break_down)
    assert caught.value.__notes__ == ["the other side failed, too: OSError: pipe closed"]


def test_a_side_that_hangs_misses_the_deadline():
    with pytest.raises(DeadlineError, match=r"weight sync to version 7 by memory: not done after 0\.1 s"):
        sync(agree, asyncio.Event().wait, timeout_s=0.1)


def test_different_fingerprints_are_refused_by_name():
    async def other():
        return {"w": 2, "v": 3}

    with pytest.raises(WeightSyncError, match=r"2 of 1 .*: v \(not sent\), w \(differs\)"):
        sync(agree, other)
