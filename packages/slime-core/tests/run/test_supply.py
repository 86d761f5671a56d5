"""Weights that are sent while the loop waits for what an engine generates."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from slime_core.errors import WeightSyncError
from slime_core.protocols import EngineCapabilities
from slime_core.run.supply import supplied


class Asking:
    """An engine that wants weights when it is told to."""

    capabilities = EngineCapabilities(asks_for_weights=True)

    def __init__(self):
        self.wanted, self.versions = asyncio.Event(), []

    async def weights_wanted(self, version):
        self.versions.append(version)
        await self.wanted.wait()


def test_weights_are_sent_as_often_as_they_are_wanted_and_the_work_goes_on():
    async def scenario():
        engine, sent = Asking(), []

        async def send():
            engine.wanted.clear()
            sent.append(1)

        async def work():
            for _ in range(3):
                engine.wanted.set()
                while engine.wanted.is_set():
                    await asyncio.sleep(0)
            return "groups"

        assert await supplied(work(), engine, version=4, send=send) == "groups"
        return sent, engine.versions

    assert asyncio.run(scenario()) == ([1, 1, 1], ["4", "4", "4", "4"])


def test_work_ends_where_weights_cannot_be_sent():
    async def scenario():
        engine, ended = Asking(), []
        engine.wanted.set()

        async def send():
            raise WeightSyncError("no engine is left")

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        with pytest.raises(WeightSyncError, match="no engine is left"):
            await supplied(work(), engine, version=4, send=send)
        return ended

    assert asyncio.run(scenario()) == [True]


def test_an_engine_that_does_not_ask_is_not_asked():
    async def work():
        return "groups"

    engine = SimpleNamespace(capabilities=EngineCapabilities())
    assert asyncio.run(supplied(work(), engine, version=4, send=None)) == "groups"
