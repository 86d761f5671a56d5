"""An engine with a bounded KV cache, in virtual time: one token a second for each request that has room."""

from __future__ import annotations

import asyncio
from collections import deque

from slime_core.protocols import Completion, EngineCapabilities, EngineLoad


class _Request:
    def __init__(self, prompt, length):
        self.prompt, self.length, self.done = prompt, length, 0
        self.over = asyncio.get_running_loop().create_future()

    @property
    def held(self):
        return self.prompt + self.done


class CachedEngine:
    """Admits whoever's tokens fit, in order; where the running ones outgrow the cache, the youngest begins anew.

    Args:
        capacity: tokens of the KV cache.
        prompt: tokens of every prompt.
        seconds: tokens of the response of each seed.
    """

    capabilities = EngineCapabilities(reports_load=True)

    def __init__(self, capacity, prompt, seconds):
        self.capacity, self.prompt, self.seconds = capacity, prompt, seconds
        self.running, self.queue = [], deque()
        self.retractions = self.most = self.readings = 0
        self.wasted = self.useful = 0
        self._ticking = None

    @property
    def held(self):
        return sum(request.held for request in self.running)

    async def generate(self, tokens, params, *, session_id=None):
        request = _Request(self.prompt, self.seconds(params.seed))
        self.queue.append(request)
        self.most = max(self.most, len(self.running) + len(self.queue))
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        reason = await request.over
        n = request.length if reason == "stop" else 0
        return Completion(tokens=[1] * n, log_probs=[-1.0] * n, finish_reason=reason, weight_version="0")

    async def abort(self):
        for request in [*self.running, *self.queue]:
            request.over.set_result("abort")
        self.running, self.queue = [], deque()

    async def current_load(self):
        self.readings += 1
        return EngineLoad(
            kv_cache_usage=self.held / self.capacity,
            running=len(self.running),
            queued=len(self.queue),
            retractions=self.retractions,
        )

    async def _tick(self):
        while self.running or self.queue:
            while self.queue and self.held + self.queue[0].held <= self.capacity:
                self.running.append(self.queue.popleft())
            while self.held + len(self.running) > self.capacity:
                youngest = self.running.pop()
                self.queue.appendleft(youngest)
                self.wasted += youngest.done
                self.retractions, youngest.done = self.retractions + 1, 0
            await asyncio.sleep(1)
            for request in self.running:
                request.done += 1
            for request in [one for one in self.running if one.done >= one.length]:
                self.running.remove(request)
                self.useful += request.length
                request.over.set_result("stop")
        self._ticking = None
