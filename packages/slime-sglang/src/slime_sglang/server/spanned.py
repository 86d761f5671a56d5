"""`SpannedPlace`: the places of a server's processes as one: its ranks are on one machine, or on several."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slime_core.protocols import Place, Site

from slime_sglang.server.disaggregation import HOST_ADDRESS

#: Which of its GPUs a process sees.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class SpannedPlace:
    """A place for one process on each of a server's machines, as SGLang wants it: they meet at the first one, which alone answers.

    Args:
        places: in the order of their ranks; each has as many GPUs as the others.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)
        self._sites: list[Site] = []
        self._logs: list[Path] = []
        self.log: Path | None = None
        """File with the output of the process that ended first; None while none has."""

    @property
    def hosts(self) -> list[str]:
        """Addresses of the machines; known once `site` has returned."""
        return [site.address or site.host for site in self._sites]

    async def site(self) -> Site:
        """Return what the next process finds on the first machine, whose `host` is where the others reach it, if there are any."""
        self._sites = list(await asyncio.gather(*(place.site() for place in self._places)))
        first = self._sites[0]
        return first if len(self._sites) == 1 else replace(first, host=self.hosts[0])

    async def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a process on each machine, with their number, its own, and on others than the first its host and port added.

        Where one cannot be started, those that were are killed.
        """
        self._logs = [log if not number else _beside(log, number) for number in range(len(self._places))]
        for number, place in enumerate(self._places):
            try:
                await place.start(*self._line(number, command, environment), self._logs[number])
            except BaseException:
                await asyncio.gather(
                    *(begun.kill() for begun in self._places[: number + 1]), return_exceptions=True
                )
                raise

    def _line(
        self, number: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the variables of a process."""
        site = self._sites[number]
        words = [*command]
        if len(self._places) > 1:
            words += ["--nnodes", str(len(self._places)), "--node-rank", str(number)]
        if number:  # where it only says that it lives
            words += ["--host", site.host, "--port", str(site.ports[0])]
        own = {**environment, _VISIBLE: ",".join(site.gpus)}
        if number and HOST_ADDRESS in own:
            own[HOST_ADDRESS] = self.hosts[number]
        return words, own

    async def wait(self) -> int:
        """Wait until one of the processes has ended, which is the end of all; returns its exit status."""
        waiting = [asyncio.ensure_future(place.wait()) for place in self._places]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended = next(number for number, one in enumerate(waiting) if one in done)
            self.log = self._logs[ended]
            await asyncio.gather(
                *(place.stop() for place in self._places if place is not self._places[ended])
            )
            return waiting[ended].result()
        finally:
            for one in waiting:
                one.cancel()

    async def stacks(self) -> str:
        """Have all processes write their stacks; returns what they wrote."""
        return "\n".join([await place.stacks() for place in self._places])

    async def stop(self) -> None:
        """Ask all processes to end, and kill those that do not in time."""
        await asyncio.gather(*(place.stop() for place in self._places))

    async def kill(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(place.kill() for place in self._places))


def _beside(log: Path, number: int) -> Path:
    return log.with_name(f"{log.stem}-node-{number}{log.suffix}")
