"""`Machine`: the Ray actor that holds a run's GPUs of one machine, and starts the engine's processes there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.devices.cuda_variables import cuda_defaults
from slime_core.runtime.processes.ports import ReservedPort, reserve_server_ports
from slime_core.runtime.processes.server_process import ServerProcess

from slime_ray.process.surroundings import Surroundings, begin_log, move_in, use_interface_of

#: What a process that is given no number of threads chooses by itself; Ray sets it for its actors, which pass it on.
_THREADS = "OMP_NUM_THREADS"


class Machine:
    """Starts processes as its children, which end with it, and it with the driver."""

    def __init__(self, surroundings: Surroundings) -> None:
        move_in(surroundings)
        self._log = surroundings.log
        if _THREADS not in surroundings.environment:
            del os.environ[_THREADS]
        self._processes: dict[int, ServerProcess] = {}
        self._ports: dict[int, tuple[ReservedPort, ReservedPort, ReservedPort]] = {}
        # A loop of its own: Ray's may be one that starts processes only where it is the main thread's.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="processes", daemon=True).start()

    async def gpus(self, numbers: Sequence[int] | None = None) -> tuple[str, ...]:
        """Return the ids of the GPUs that Ray gave it: those of some numbers, or all."""
        import ray

        ids = sorted(map(str, ray.get_gpu_ids()), key=lambda number: (len(number), number))
        return tuple(ids if numbers is None else (ids[number] for number in numbers))

    async def whereabouts(self) -> tuple[str, int, tuple[str, ...]]:
        """Begin the log, and return the IP address of this machine, the process id, and the ids of its GPUs."""
        import ray

        begin_log(self._log)
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
        use_interface_of(address)
        return address, os.getpid(), await self.gpus()

    async def reserve(self, number: int) -> tuple[int, int, int]:
        """Reserve the TCP ports of a `slime_core.protocols.Site` for the next process of a place, in the place of those that the last one had."""
        for port in self._ports.pop(number, ()):
            port.release()
        self._ports[number] = reserve_server_ports()
        first, second, third = self._ports[number]
        return first.number, second.number, third.number

    async def start(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        """Start a process at a place."""
        if environment.get("CUDA_VISIBLE_DEVICES"):
            found = await asyncio.to_thread(cuda_defaults, "server", {**os.environ, **environment})
            environment = {**found, **environment}
        self._processes[number] = ServerProcess(command, environment=environment, log=log)
        await self._there(self._processes[number].start())

    async def wait(self, number: int) -> int:
        """Wait until the process of a place has ended; returns its exit status."""
        return int(await self._there(self._processes[number].wait()))

    async def stacks(self, number: int) -> str:
        """Return the stacks of the process of a place and its helpers, which they write to its log."""
        return str(await self._there(self._processes[number].stacks())) if number in self._processes else ""

    async def stop(self, number: int) -> None:
        """Terminate the process of a place, and kill what is left of it."""
        if number in self._processes:
            await self._there(self._processes[number].stop())

    async def kill(self, number: int) -> None:
        """Kill the process of a place, and what it started."""
        if number in self._processes:
            await self._there(self._processes[number].kill())

    async def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
