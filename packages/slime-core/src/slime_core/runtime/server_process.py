"""`ServerProcess`: a server as a child process, started, watched and stopped; and TCP ports of this host."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.devices.cuda_variables import users_environment
from slime_core.runtime.at_exit import AtExit

#: Seconds that a server gets to end by itself before it is killed.
_GRACE_S = 10.0
_POLL_S = 0.05
#: Bytes of the log's end that an error shows.
_TAIL = 2000
_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """A server and its helpers, in a process group of their own that dies with this process.

    Args:
        command: command line.
        environment: variables to add to those of this process that its user has set.
        log: file that its output goes to.
        name: how messages call it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        name: str = "the server",
    ) -> None:
        self._command, self._environment, self.log, self.name = command, environment, log, name
        self._process: asyncio.subprocess.Process | None = None
        self._guard: AtExit | None = None

    @property
    def exit_status(self) -> int | None:
        """How it ended: its exit status, minus the signal's number, or None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**users_environment(os.environ), **self._environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        # Its helpers are to die with it, and do not before they have imported what they need.
        self._guard = AtExit('kill -s KILL -- "-$0"', str(self._process.pid))

    async def wait(self) -> int:
        """Wait until it has ended, and return `exit_status`."""
        assert self._process is not None, "wait before start"
        return await self._process.wait()

    async def stop(self) -> None:
        """Terminate it and its helpers, and kill those that do not exit in time."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _GRACE_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill it and its helpers, and wait until their memory is free."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a host whose first process reaps nobody keeps their entries
            async with asyncio.timeout(_GRACE_S):
                while self._signal(0):
                    await asyncio.sleep(_POLL_S)
                if self._guard is not None:
                    self._guard.cancel()

    @property
    def failure(self) -> str | None:
        """How it exited, and the end of its log; None while it runs."""
        if self.exit_status is None:
            return None
        return how_it_ended(self.name, self.exit_status, self.log)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group, 0 for none; returns whether anybody is in it."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def how_it_ended(name: str, status: int, log: Path) -> str:
    """Return how a server exited, and the end of its log, for an error."""
    tail = log.read_bytes()[-_TAIL:].decode(errors="replace").strip() if log.exists() else ""
    return f"{name} ended with status {status}; its log is {log} and ends:\n{tail}"


class ReservedPort:
    """A free TCP port of this host, which no other process is given while it is reserved; a server can still listen there.

    Without it, of 64 ports that were free a moment ago two are the same in one try of eight.

    Args:
        host: address of this host; 0.0.0.0 for all of them.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Release it; may be called twice."""
        self._socket.close()


def free_port() -> int:
    """Return a TCP port of this host that was free a moment ago."""
    port = ReservedPort()
    port.release()
    return port.number


def local_port_is_free(port: int) -> bool:
    """Return whether nobody listens on a TCP port of this host."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_local_address(address: str) -> bool:
    """Return whether `host:port` is of this host, so that its server shares this host's memory."""
    host, _, _ = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return any(_can_bind(family, place) for family, *_, place in found)


def _die_with_parent() -> None:
    """In the child: be killed when the parent ends, whatever ends it (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _can_bind(family: int, place: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True
