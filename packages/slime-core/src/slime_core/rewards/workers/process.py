"""`WorkerProcess`: the trainer's handle of one guard with its fork server and worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any

from slime_core.errors import PluginError
from slime_core.rewards.workers.guard import cause_of_death, kill_from_outside
from slime_core.rewards.workers.wire import (
    ALIVE,
    HEADER,
    MAX_REPLY_BYTES,
    Setup,
    frame,
    job_number,
    read_reply,
)

#: What the interpreter of a worker runs, with this process's import path as its arguments.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from slime_core.rewards.workers import fork_server, guard; guard.main(fork_server.serve)"
)
_LAST_LOOK_S = 0.05
_GUARD_S = 5.0
_LOOKS = 5
#: In the environment of all that a worker starts.
_MARK = "SLIME_REWARD_WORKER"


class WorkerDied(Exception):
    """The worker's process ended while a reply was awaited; says how."""


class WorkerGarbled(WorkerDied):
    """The process sent something that is no reply, and was killed: perhaps left from the job before this one."""


async def done_within(task: asyncio.Task[Any], timeout_s: float) -> bool:
    """Return whether `task` ends in time; if not, it keeps running.

    An event loop that was itself held up sees the deadline and the result at once, the deadline first:
    hence the last look.
    """
    await asyncio.wait({task}, timeout=timeout_s)
    if not task.done():
        await asyncio.wait({task}, timeout=_LAST_LOOK_S)
    return task.done()


class WorkerProcess:
    """A process that calls one reward, one frame of jobs at a time. Belongs to the event loop that started it."""

    def __init__(self, process: asyncio.subprocess.Process, *, mark: str) -> None:
        self._process = process
        self._mark = mark
        self._heard = 0
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, setup: Setup) -> tuple[WorkerProcess, bool]:
        """Start a process, wait until it has imported the reward, and say whether the reward is async.

        Raises:
            PluginError: the system starts no process, or the reward does not import, does not take its options, or ends its
                process on import.
        """
        mark = secrets.token_hex(16)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _BOOT,
                *(path or "." for path in sys.path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # an interrupt from the terminal is the trainer's to handle
                env={**os.environ, _MARK: mark},
            )
        except OSError as error:  # no memory, processes or open files are left
            raise PluginError(f"reward {setup.reference}: its process does not start: {error}") from error
        worker = cls(process, mark=f"{_MARK}={mark}")
        try:
            answer = await worker.call(pickle.dumps(setup), timeout_s=setup.start_timeout_s)
            if "error" in answer:
                raise PluginError(answer["error"])
        except WorkerDied as death:
            raise PluginError(f"reward {setup.reference}: its process {death} while importing it") from None
        except BaseException as error:
            await worker.kill()
            if isinstance(error, TimeoutError):
                raise PluginError(
                    f"reward {setup.reference}: does not import within {setup.start_timeout_s:g} s"
                ) from None
            raise
        return worker, answer.get("is_async", False)

    async def call(self, payload: bytes, *, timeout_s: float) -> dict[str, Any]:
        """Send a job of one reply, and return it; raises as `stream` does."""
        replies: list[dict[str, Any]] = []
        await self.stream(payload, 1, replies.append, timeout_s=timeout_s)
        return replies[0]

    async def stream(
        self, payload: bytes, count: int, hear: Callable[[dict[str, Any]], None], *, timeout_s: float
    ) -> None:
        """Send a job of `count` replies, and call `hear` with each as it comes.

        Args:
            payload: the job.
            count: number of replies.
            hear: given each.
            timeout_s: longest silence; a fork server says each second that it is there.

        Raises:
            TimeoutError: silence. The process still runs: kill it.
            WorkerDied: the process ended.
            WorkerGarbled: it sent garbage and was killed.
        """
        self._reading = asyncio.create_task(self._exchange(job_number(), payload, count, hear))
        silent = 0
        while not self._reading.done() and silent < _LOOKS:
            heard = self._heard
            # Several short looks: a loop that was itself held up must not take its own silence for the fork server's.
            await done_within(self._reading, timeout_s / _LOOKS)
            silent = silent + 1 if heard == self._heard else 0
        if not self._reading.done():
            raise TimeoutError
        if self._reading.cancelled():
            raise WorkerDied("was ended by its pool")
        try:
            self._reading.result()
        except (EOFError, ConnectionError):
            raise WorkerDied(cause_of_death(await self.kill())) from None
        except ValueError as error:
            await self.kill()
            raise WorkerGarbled(f"sent garbage ({error})") from None

    def doom(self) -> None:
        """Close the pipe, so that the guard kills everything below it. Does not wait."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # A reward may have stopped the guard. `send_signal` would read the status of one that has just ended, which the
                # event loop then misses: it says 255.
                os.kill(self._process.pid, signal.SIGCONT)
        if self._reading is not None:
            self._reading.cancel()
        assert self._process.stdin is not None
        if not self._process.stdin.transport.is_closing():
            self._process.stdin.transport.abort()  # close() would wait for a full pipe to drain

    async def kill(self) -> int:
        """Kill the process and all that the reward started, wait for the end, and return the exit status."""
        self.doom()
        if self._reading is not None:
            await asyncio.wait({self._reading})
        ended = asyncio.create_task(self._drain())
        if not await done_within(ended, _GUARD_S):
            kill_from_outside(self._process.pid, self._mark)  # something stops the guard again and again
            if not await done_within(ended, _GUARD_S):  # stuck in the kernel; nothing waits for ever
                ended.cancel()
                return -signal.SIGKILL
        if ended.result() == -signal.SIGKILL:
            kill_from_outside(None, self._mark)  # a guard that was killed leaves its orphans running
        return ended.result()

    async def _exchange(
        self, number: int, payload: bytes, count: int, hear: Callable[[dict[str, Any]], None]
    ) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(frame(number, payload))
        await stdin.drain()
        while count:
            length, answered = HEADER.unpack(await stdout.readexactly(HEADER.size))
            if answered != number or length > MAX_REPLY_BYTES:
                raise ValueError(f"a reply to job {answered} of {length} bytes; wanted one to job {number}")
            reply = read_reply(await stdout.readexactly(length))
            self._heard += 1
            if reply != ALIVE:
                count -= 1
                hear(reply)

    async def _drain(self) -> int:
        """Read what is left, so that the end is seen behind it, and wait for the process."""
        assert self._process.stdout is not None
        while await self._process.stdout.read(1 << 16):
            pass
        return await self._process.wait()
