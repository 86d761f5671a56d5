"""`Answers`: waits for what one server answers, until it exits; one that misses a deadline says where it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from slime_core.errors import DeadlineError
from slime_core.runtime.calls import Callee, calling, tell_both_ends
from slime_core.runtime.processes.server_process import ServerProcess

from slime_sglang.http.client import ConnectionLostError
from slime_sglang.server.external import ExternalServer
from slime_sglang.server.placed import PlacedServer

#: Seconds to wait for a server's exit status after a lost connection: its sockets close before the status is known.
_EXIT_STATUS_WAIT_S = 1.0
#: Seconds in which a server is not asked again where it is: many requests miss their deadlines together.
_QUIET_S = 60.0
#: Files in its stacks that only pass calls on.
_PASSES_ON = (
    "/site-packages/torch/nn/modules/module.py",
    "/site-packages/uvloop/",
    "/site-packages/uvicorn/",
)


class Answers:
    """Waits for the answers of a server.

    Args:
        server: which may not be started yet.
        check_usable: raises the EngineError that says how it ended, if it has.
    """

    def __init__(
        self, server: ServerProcess | ExternalServer | PlacedServer, check_usable: Callable[[], None]
    ) -> None:
        self._server, self._check_usable = server, check_usable
        self._told_at = -_QUIET_S

    async def of(self, what: str, work: Awaitable[Any]) -> Any:
        """Await a call to the server.

        Args:
            what: it is asked for.
            work: the call.

        Raises:
            EngineError: the server exited meanwhile; with its exit status, at once.
            DeadlineError: the call's own. The stacks of both ends are in the log then.
        """
        call = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._server.wait())
        try:
            with calling(what, self._callee):
                await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    self._check_usable()
                return await call
        except ConnectionLostError:
            is_external = isinstance(self._server, ExternalServer)
            await asyncio.wait({ended}, timeout=0 if is_external else _EXIT_STATUS_WAIT_S)
            self._check_usable()
            raise
        except DeadlineError as error:
            await self.tell(what, error)
            raise
        finally:
            call.cancel()
            ended.cancel()

    async def tell(self, what: str, missed: DeadlineError) -> None:
        """Have both ends of a call that missed its deadline say where they are; notes it on the error."""
        if time.monotonic() < self._told_at + _QUIET_S:
            return
        self._told_at = time.monotonic()
        for note in await tell_both_ends(str(missed), [(what, self._callee)]):
            missed.add_note(note)

    @property
    def _callee(self) -> Callee:
        return Callee(self._server.name, self._server.stacks, _PASSES_ON)
