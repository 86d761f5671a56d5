"""`DeviceMemory`: the memory of a server's device, released and taken back in the order in which an update needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
#: SGLang's names of what it releases: the first is needed to load weights, the others to generate.
_WEIGHTS, _REST = ["weights"], ["kv_cache", "cuda_graph"]


class DeviceMemory:
    """Memory of one server. While weights are loaded the KV cache is not there yet: their copies on the device have its room.

    Args:
        call: posts a body to a path of the server.
    """

    def __init__(self, call: Callable[[str, Mapping[str, Any]], Awaitable[Any]]) -> None:
        self._call, self._taking = call, asyncio.Lock()
        self.lacks_cache = False
        """Whether that of the weights is back and that of the KV cache is not: nothing can be generated."""

    async def release(self) -> None:
        """Release all of it; the server must be idle."""
        await self.take_all()  # SGLang releases what it has
        await self._call(_RELEASE, {})

    async def take_for_weights(self) -> None:
        """Take that of the weights back."""
        await self._call(_RESUME, {"tags": _WEIGHTS})
        self.lacks_cache = True

    async def take_all(self) -> None:
        """Take back what else was released; nothing where nothing lacks."""
        async with self._taking:
            if self.lacks_cache:
                await self._call(_RESUME, {"tags": _REST})
                self.lacks_cache = False
