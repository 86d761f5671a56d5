"""The tabular engine and trainer as a run that is placed: ranks and processes of the engine say which GPUs they got.

`SERVERS` holds the engine's processes: [[first, count], ...]. Each writes a line of JSON to `placed/server_FIRST.log` and has a
child that does not mind that it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from letters.ranked import RankedTrainer
from slime_core.config.build import BuildContext
from slime_core.config.factories import EngineFactory, TrainerFactory
from slime_core.protocols import EngineGpus, GpuRange, Place
from slime_core.testing import tabular

#: A process that a launcher starts: it says what it sees, and waits for its end.
PROCESS = """
import json, os, subprocess, sys
child = subprocess.Popen(["/bin/sleep", "1000"])
seen = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "pids": [os.getpid(), child.pid], "job": os.environ.get("OF_THE_JOB"), "nice": os.nice(0)}
print(json.dumps({**seen, "site": sys.argv[1:], "threads": os.environ.get("OMP_NUM_THREADS")}), flush=True)
child.wait()
"""


class PlacedEngine:
    """A tabular engine, and a process at each place."""

    capabilities = tabular.TabularEngine.capabilities

    def __init__(self, places: dict[int, Place], folder: Path) -> None:
        self._inner, self._places, self._folder = tabular.TabularEngine(), places, folder

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def start(self) -> None:
        await asyncio.gather(*(self._start(first) for first in self._places))
        await self._inner.start()

    async def close(self) -> None:
        await asyncio.gather(*(place.stop() for place in self._places.values()))

    async def _start(self, first: int) -> None:
        place, log = self._places[first], self._folder / f"server_{first}.log"
        site = await place.site()
        words = [sys.executable, "-c", PROCESS, site.host, *map(str, site.ports)]
        await place.start(words, {"CUDA_VISIBLE_DEVICES": ",".join(site.gpus)}, log)
        while not log.exists() or not log.read_text().endswith("\n"):
            await asyncio.sleep(0.02)


def gpus(build: BuildContext) -> EngineGpus:
    ranges = tuple(GpuRange(first, count) for first, count in json.loads(os.environ.get("SERVERS", "[]")))
    return EngineGpus(sum(each.count for each in ranges), ranges)


class TellingTrainer(RankedTrainer):
    """A ranked trainer that says which GPU it sees in its rank's log."""

    async def start(self) -> None:
        seen = {
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "given": self._rank.gpu,
            "job": os.environ.get("OF_THE_JOB"),
            "nice": os.nice(0),
        }
        print(json.dumps({"rank": self._rank.number, "pid": os.getpid(), **seen}), flush=True)
        await super().start()


create_engine = EngineFactory(
    lambda build: PlacedEngine(dict(build.places or {}), build.run_dir.absolute() / "placed"),
    PlacedEngine.capabilities,
    gpus=gpus,
)
create_trainer = TrainerFactory(
    lambda build: TellingTrainer(tabular.create_trainer(build), build.rank), TellingTrainer.capabilities
)
