"""`SpannedPlace`: several machines' places as one, for a server whose ranks are on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.protocols import Place, Site

#: Which of its GPUs a process sees.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class SpannedPlace:
    """A place for one process on each of several machines, as SGLang wants it: they meet at the first one, which alone answers.

    Args:
        places: in the order of their ranks; each has as many GPUs as the others.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)
        self._sites: list[Site] = []

    async def site(self) -> Site:
        """Return what the next process finds on the first machine."""
        self._sites = list(await asyncio.gather(*(place.site() for place in self._places)))
        return self._sites[0]

    async def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a process on each machine, with their number, its own, and where they meet added to its command line."""
        first = self._sites[0]
        for number, (place, site) in enumerate(zip(self._places, self._sites, strict=True)):
            words = ["--nnodes", str(len(self._places)), "--node-rank", str(number)]
            words += ["--dist-init-addr", f"{first.host}:{first.ports[1]}"]
            own = {**environment, _VISIBLE: ",".join(site.gpus)}
            await place.start([*command, *words], own, log if not number else _beside(log, number))

    async def wait(self) -> int:
        """Wait until one of the processes has ended, which is the end of all; returns its exit status."""
        waiting = [asyncio.ensure_future(place.wait()) for place in self._places]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await self.stop()
            return done.pop().result()
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
