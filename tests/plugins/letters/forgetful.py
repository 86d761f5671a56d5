"""An engine over a table of letters that loses its weights now and then, as one whose only server is replaced, and asks for them."""

from __future__ import annotations

import asyncio
import dataclasses

from slime_core.config.factories import EngineFactory
from slime_core.testing.tabular import TabularEngine

#: Requests after which the weights are lost, again and again.
REQUESTS = 90


class ForgetfulEngine(TabularEngine):
    """Has requests that come after a loss wait until it gets weights again."""

    capabilities = dataclasses.replace(TabularEngine.capabilities, asks_for_weights=True)

    def __init__(self):
        super().__init__()
        self._there, self._lost, self._n_requests = asyncio.Event(), asyncio.Event(), 0

    async def generate(self, tokens, params, *, session_id=None):
        self._n_requests += 1
        if self._n_requests % REQUESTS == 0:
            self._there.clear()
            self._lost.set()
        while not self._there.is_set():
            await self._there.wait()
        return await super().generate(tokens, params, session_id=session_id)

    async def weights_wanted(self, version):
        await self._lost.wait()

    async def receive(self, plan):
        held = await super().receive(plan)
        self._lost.clear()
        self._there.set()
        return held


#: The engine of the runs.
create_engine = EngineFactory(lambda build: ForgetfulEngine(), ForgetfulEngine.capabilities)
