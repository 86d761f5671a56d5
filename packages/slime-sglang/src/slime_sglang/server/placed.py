"""`PlacedServer`: a server that a launcher starts at a place of its own, on this host or another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slime_core.errors import EngineError
from slime_core.protocols import Site
from slime_core.runtime.processes.ports import is_local_address
from slime_core.runtime.processes.server_process import how_it_ended

from slime_sglang.server.spanned import SpannedPlace

#: A command line, and variables to add to the environment.
CommandLine = tuple[Sequence[str], Mapping[str, str]]


class PlacedServer:
    """Takes the part of a `ServerProcess` for a server that is started where the launcher has room for it.

    Args:
        place: where.
        command: returns what to start, once it is known what is there.
        log: file that its output goes to, which both hosts see.
        crosses_hosts: whether weight updates reach a server on another host.
        meets_others: whether it exchanges caches with other servers, so that it listens where other machines reach it.
    """

    def __init__(
        self,
        place: SpannedPlace,
        command: Callable[[Site], CommandLine],
        *,
        log: Path,
        crosses_hosts: bool,
        meets_others: bool,
    ) -> None:
        self._place, self._command, self.log = place, command, log
        self._crosses_hosts, self._meets_others = crosses_hosts, meets_others
        self._site: Site | None = None
        self._ended: asyncio.Task[int] | None = None
        self._failure: str | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        return "the SGLang server" + ("" if self._site is None else f" on {self._site.host}")

    @property
    def address(self) -> str:
        """`host:port` of its HTTP interface; known once it is started."""
        assert self._site is not None, "address before start"
        return f"{self._site.host}:{self._site.ports[0]}"

    @property
    def bootstrap_address(self) -> str:
        """`host:port` where decode engines find it; known once it is started."""
        assert self._site is not None, "bootstrap_address before start"
        return f"{self._site.host}:{self._site.ports[1]}"

    async def start(self) -> None:
        """Start it.

        Raises:
            EngineError: the place is lost, or is on a host that weight updates do not reach.
        """
        site = await self._place.site()
        self._site = replace(site, host=site.address or site.host) if self._meets_others else site
        for host in self._place.hosts:
            if not is_local_address(f"{host}:0"):
                self._check_reach(host)
        command, environment = self._command(self._site)
        await self._place.start(command, environment, self.log)
        self._ended = asyncio.create_task(self._place.wait())

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit status, as `ServerProcess` has it."""
        assert self._ended is not None, "wait before start"
        with contextlib.suppress(EngineError):
            return await asyncio.shield(self._ended)
        return -1

    async def stacks(self) -> str:
        """Return the stacks of it and its helpers, which they write to its log."""
        return await self._place.stacks()

    async def stop(self) -> None:
        """Terminate it and its helpers, and kill those that do not exit in time."""
        await self._end(self._place.stop)

    async def kill(self) -> None:
        """Kill it and its helpers."""
        await self._end(self._place.kill)

    @property
    def failure(self) -> str | None:
        """How it exited, and the end of its log; None while it runs."""
        if self._ended is None or not self._ended.done():
            return None
        if self._ended.cancelled():
            return f"{self.name} is not used any more"
        if (lost := self._ended.exception()) is not None:
            return f"{self.name} is lost: {lost}"
        if self._failure is None:  # each request that is lost with it asks
            self._failure = how_it_ended(self.name, self._ended.result(), self._place.log or self.log)
        return self._failure

    async def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        if self._ended is None:
            return
        with contextlib.suppress(EngineError):  # the place is lost, and the server with it
            await end()
        await self.wait()

    def _check_reach(self, host: str) -> None:
        if not self._crosses_hosts:
            raise EngineError(
                f"the SGLang server on {host}: weights go by the memory of the host that the run was started on; give "
                "--update-weight-transport nccl (cuda-ipc where ranks of the trainer are on all hosts of servers, as with "
                "--colocate) or disk, no loopback address as --update-weight-host, and an --output-dir that both hosts see under "
                "one name"
            )
