"""`Batches`: gathers what samples ask of a server into requests of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slime_core.errors import RewardError

from slime_rm.remote.json_client import RefusedError


class Batches:
    """Answers one entry at a time by posting several together. Belongs to one event loop.

    Args:
        post: sends entries and returns one answer each, in order; raises RewardError, which then fails each. What is
            refused is sent again one by one, so that an entry that the server cannot take fails alone.
        size: most entries of a request.
        wait_s: longest that an entry waits for others to fill its batch, seconds.
    """

    def __init__(
        self, post: Callable[[list[Any]], Awaitable[Sequence[Any]]], *, size: int, wait_s: float
    ) -> None:
        self._post = post
        self._size = size
        self._wait_s = wait_s
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._flush: asyncio.TimerHandle | None = None
        self._posting: set[asyncio.Task[None]] = set()

    async def answer(self, entry: Any) -> Any:
        """Return the answer to an entry.

        Raises:
            RewardError: its request failed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((entry, answer))
        if len(self._waiting) >= self._size:
            self._send()
        elif self._flush is None:
            self._flush = loop.call_later(self._wait_s, self._send)
        return await answer

    def close(self) -> None:
        """Cancel the requests in flight."""
        for task in self._posting:
            task.cancel()

    def _send(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        batch = [(entry, answer) for entry, answer in self._waiting if not answer.done()]
        self._waiting = []
        if batch:
            task = asyncio.create_task(self._settle(batch))
            self._posting.add(task)
            task.add_done_callback(self._posting.discard)

    async def _settle(self, batch: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        try:
            answers = await self._post([entry for entry, _ in batch])
        except RewardError as error:
            if isinstance(error, RefusedError) and len(batch) > 1:
                await asyncio.gather(*(self._settle([each]) for each in batch))
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(RewardError(str(error)))
            return
        except Exception as error:  # raised again by each that waits, who would wait for ever
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
