"""`ServerProcess`: a server as a child process, started, watched and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.devices.cuda_variables import users_environment
from slime_core.runtime.processes.at_exit import AtExit
from slime_core.runtime.processes.stacks import ask_for_stacks

#: Variable that names a server's scratch folder, which is deleted when the server has ended, however it ended; and so is shared
#: memory that has the folder's name in its own.
SCRATCH_VARIABLE = "SLIME_SERVER_SCRATCH"
_SHARED_MEMORY = Path("/dev/shm")
#: Empty variables stand for no proxy. A proxy of the environment is for the internet; a server of a run asks itself and others of the run.
_NO_PROXIES = {
    name: "" for scheme in ("http_proxy", "https_proxy", "all_proxy") for name in (scheme, scheme.upper())
}
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
        environment: variables to add to those of this process that its user has set, of which it gets no proxy.
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
        self._failure: str | None = None
        self._beside = contextlib.ExitStack()
        """Ends what is there for as long as the server is: its guard and its scratch folder."""

    @property
    def exit_status(self) -> int | None:
        """How it ended: its exit status, minus the signal's number, or None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix="slime-server-")
        shared_memory = f"*{Path(scratch).name}*"
        delete = weakref.finalize(self, _delete, scratch, shared_memory)  # at exit at the latest
        guard = AtExit(
            f'kill -s KILL -- "-$0"; rm -rf -- {shlex.quote(scratch)} {_SHARED_MEMORY}/{shared_memory}'
        )

        def in_child() -> None:  # so that there is no moment at which it has helpers that nobody would end
            _die_with_parent()
            guard.tell(str(os.getpid()))

        with self.log.open("wb") as output, contextlib.ExitStack() as beside:
            beside.callback(delete)
            beside.callback(guard.cancel)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env={
                    **users_environment(os.environ),
                    **_NO_PROXIES,
                    **self._environment,
                    SCRATCH_VARIABLE: scratch,
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=in_child,
            )
            self._beside = beside.pop_all()

    async def wait(self) -> int:
        """Wait until it has ended, and return `exit_status`."""
        assert self._process is not None, "wait before start"
        return await self._process.wait()

    async def stacks(self) -> str:
        """Have it and its helpers write their stacks to its log, those that know how, and return what they wrote."""
        if self._process is None or self._process.returncode is not None:
            return ""
        return await asyncio.to_thread(_stacks_of_group, self._process.pid, self.log)

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
                self._beside.close()

    @property
    def failure(self) -> str | None:
        """How it exited, and the end of its log; None while it runs."""
        if self._failure is None and self.exit_status is not None:  # each request that is lost with it asks
            self._failure = how_it_ended(self.name, self.exit_status, self.log)
        return self._failure

    def _signal(self, number: int) -> bool:
        """Send a signal to the group, 0 for none; returns whether anybody is in it."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def _stacks_of_group(group: int, log: Path) -> str:
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            members += [int(folder.name)] if os.getpgid(int(folder.name)) == group else []
    return ask_for_stacks(members, log)


def how_it_ended(name: str, status: int, log: Path) -> str:
    """Return how a server exited, and the end of its log, for an error."""
    return f"{name} ended with status {status}; its log is {log} and ends:\n{_end_of(log)}"


def _end_of(log: Path) -> str:
    """Return the last `_TAIL` bytes of a file, of whatever size, as text; nothing where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read(_TAIL).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _delete(folder: str, shared_memory: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path in _SHARED_MEMORY.glob(shared_memory):
        path.unlink(missing_ok=True)


def _die_with_parent() -> None:
    """In the child: be killed when the parent ends, whatever ends it (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
