"""`TokenBudget`: the tokens that the turns of a session may sample together, also where they are generated side by side."""

from __future__ import annotations

import asyncio


class TokenBudget:
    """Tokens that turns reserve before they are generated, and of which they give back what they did not sample.

    Args:
        n_tokens: of all turns together.
    """

    def __init__(self, n_tokens: int) -> None:
        self._n_free, self._n_holders = n_tokens, 0
        self._queue, self._freed = asyncio.Lock(), asyncio.Event()

    async def reserve(self, wanted: int) -> int:
        """Reserve tokens, first come, first served; waits while turns in flight hold some of those that are wanted.

        Args:
            wanted: the most that the turn may sample.

        Returns:
            How many it may sample: fewer where turns that have ended have left fewer, and 0 where they have left none, or none is
            wanted. What comes back is to be released, 0 too.
        """
        async with self._queue:
            while self._n_free < wanted and self._n_holders:
                self._freed.clear()
                await self._freed.wait()
            n = min(wanted, self._n_free)
            self._n_free -= n
            self._n_holders += 1
            return n

    def release(self, n_unused: int) -> None:
        """Give back what a turn has reserved and not sampled."""
        self._n_free += n_unused
        self._n_holders -= 1
        self._freed.set()
