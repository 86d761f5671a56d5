"""The slow engine of `letters.slow`, whose draws are made by servers at the launcher's places: any of them may be killed.

`SERVERS` says how many there are. One that ends, ends the run by its name. Without places all is drawn in this process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
from letters.slow import SlowEngine
from slime_core.config.build import BuildContext
from slime_core.config.factories import EngineFactory
from slime_core.errors import EngineError
from slime_core.protocols import Completion, EngineGpus, GpuRange, Place, SamplingParams
from slime_core.testing.tabular import TabularEngine

_PATIENCE_S = 60.0


async def serve(host: str, port: int) -> None:
    """Answer requests, a line of JSON each: a prompt, a table and how to sample."""
    engine = TabularEngine()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            asked = json.loads(line)
            engine.table, engine.version = np.array(asked["table"]), asked["version"]
            done = await engine.generate(asked["tokens"], SamplingParams(**asked["params"]))
            writer.write(json.dumps(dataclasses.asdict(done)).encode() + b"\n")
        writer.close()

    async with await asyncio.start_server(answer, host, port, limit=1 << 20) as server:
        await server.serve_forever()


class Server:
    """One server at its place, and a connection to it."""

    def __init__(self, number: int, place: Place, log: Path) -> None:
        self.name, self._place, self._log = f"letters server {number}", place, log
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        site = await self._place.site()
        words = [sys.executable, __file__, site.host, str(site.ports[0])]
        await self._place.start(words, {"PYTHONPATH": os.pathsep.join(sys.path)}, self._log)
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                try:
                    self._streams = await asyncio.open_connection(site.host, site.ports[0], limit=1 << 20)
                    return
                except OSError:
                    await asyncio.sleep(0.1)

    async def ask(self, asked: dict) -> dict:
        reader, writer = self._streams
        async with self._turn:
            try:
                writer.write(json.dumps(asked).encode() + b"\n")
                return json.loads(await reader.readline())
            except (OSError, ValueError) as error:
                raise EngineError(f"{self.name} is lost: {error or 'its connection was closed'}") from error

    async def close(self) -> None:
        await self._place.stop()


class ServedEngine(SlowEngine):
    """Waits as a slow engine does, and has its servers draw in turn."""

    def __init__(self, servers: list[Server]) -> None:
        super().__init__()
        self._servers, self._n_asked = servers, 0

    async def start(self) -> None:
        await asyncio.gather(*(server.start() for server in self._servers))

    async def _generate(self, tokens, params):
        if not self._servers:
            return await super()._generate(tokens, params)
        self._n_asked += 1
        server = self._servers[self._n_asked % len(self._servers)]
        asked = {"table": self.table.tolist(), "version": self.version, "tokens": list(tokens)}
        return Completion(**await server.ask(asked | {"params": dataclasses.asdict(params)}))

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))


def gpus(build: BuildContext) -> EngineGpus:
    count = int(os.environ.get("SERVERS", "0"))
    return EngineGpus(count, tuple(GpuRange(number) for number in range(count)))


def _create(build: BuildContext) -> ServedEngine:
    folder = build.run_dir.absolute() / "placed"
    places = sorted((build.places or {}).items())
    return ServedEngine([Server(number, place, folder / f"server_{number}.log") for number, place in places])


create_engine = EngineFactory(_create, ServedEngine.capabilities, gpus=gpus)

if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
