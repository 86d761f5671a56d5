"""Running an agent program: a command line, or a function of the user's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime_core.errors import DeadlineError
from slime_core.runtime.deadline import within
from slime_core.runtime.processes.tree import descendants, marked

#: A word of a command line that stands for the interpreter of this process.
PYTHON = "{python}"
#: Characters of a program's output that are kept, the last ones.
TAIL = 2000
#: Seconds that a program has to end by itself once it is told to.
GRACE_S = 2.0
#: Seconds after a program's exit in which what it wrote is read; what it left running may keep its output open for ever.
OUTPUT_S = 1.0
_POLL_S = 0.02
#: Variable with the task, and the bytes that Linux gives one string of an environment: name, `=` and the NUL at its end included.
TASK, _VARIABLE_BYTES = "SLIME_TASK", 1 << 17
#: Variable with the session's key. What has it in its environment was started by the session's program.
_KEY = "SLIME_API_KEY"

#: `async (base_url, api_key, task)`: returns a reward, or nothing.
AgentFunction = Callable[[str, str, Mapping[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended."""

    ended_by: str
    """`exit`, `timeout`, `error` where a function raised or a program could not be started, or `stopped` where nothing more
    could come of its session."""
    reward: float | None = None
    """1.0 or 0.0 by its exit status, or what a function returned."""
    status: int | None = None
    """Exit status of a program; negative: the signal that ended it."""
    output: str = ""
    """The end of what a program wrote, or the error of a function."""


async def run_program(
    command: Sequence[str],
    base_url: str,
    api_key: str,
    task: Mapping[str, Any],
    *,
    timeout_s: float,
    over: asyncio.Event,
) -> Outcome:
    """Run a command line, and kill it with all that it started at the deadline, or when its session is over.

    It has ended when its own process has; what that leaves running is killed then, also what left its session (`setsid`, a daemon): by
    its parents while they live, and by the key in its environment. Only what has neither is missed.

    The addresses and the key are in the variables that the official packages read, the task is JSON on its standard input and in
    `SLIME_TASK`; on its standard input alone where it is too long for a variable.

    Args:
        command: the program and its arguments.
        base_url: where it asks the policy.
        api_key: of this session alone: what has it in its environment is killed with the program.
        task: what it is given.
        timeout_s: the deadline, seconds.
        over: set when its session is.

    Raises:
        OSError: it cannot be started.
    """
    written = json.dumps(task, ensure_ascii=False, default=str).encode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable if word == PYTHON else word for word in command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env=_environment(base_url, api_key, written),
    )
    kept = bytearray()
    reading = asyncio.create_task(_follow(process, written, kept))
    exited = asyncio.create_task(_exit(process))
    stopped = asyncio.create_task(over.wait())
    try:
        await asyncio.wait({exited, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ended_by = "exit" if exited.done() else "stopped" if stopped.done() else "timeout"
        if exited.done():
            await asyncio.wait({reading}, timeout=OUTPUT_S)
    finally:
        exited.cancel()
        stopped.cancel()
        await _end(process, reading, f"{_KEY}={api_key}")
    status = process.returncode
    reward = float(status == 0) if ended_by == "exit" else 0.0
    return Outcome(
        ended_by=ended_by, reward=reward, status=status, output=kept.decode(errors="replace")[-TAIL:]
    )


async def run_function(
    function: AgentFunction,
    base_url: str,
    api_key: str,
    task: Mapping[str, Any],
    *,
    timeout_s: float,
    over: asyncio.Event,
) -> Outcome:
    """Call a function, under the deadline, until its session is over."""

    async def call() -> Outcome:
        try:
            returned = await function(base_url, api_key, task)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the edge of the run: an agent is somebody else's program
            return Outcome(ended_by="error", reward=0.0, output=f"{type(error).__name__}: {error}"[-TAIL:])
        is_number = isinstance(returned, int | float) and math.isfinite(returned)
        return Outcome(ended_by="exit", reward=float(returned) if is_number else None)

    running = asyncio.create_task(within(timeout_s, "the agent", call()))
    stopped = asyncio.create_task(over.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return Outcome(ended_by="stopped", reward=0.0)
        return await running
    except DeadlineError:
        return Outcome(ended_by="timeout", reward=0.0)
    finally:
        stopped.cancel()
        if not running.done():
            running.cancel()
            with contextlib.suppress(BaseException):
                await running


def _environment(base_url: str, api_key: str, task: bytes) -> dict[str, str]:
    made = {**os.environ, **_variables(base_url, api_key)}
    made.pop(TASK, None)
    if len(f"{TASK}=") + len(task) < _VARIABLE_BYTES:
        made[TASK] = task.decode()
    return made


def _variables(base_url: str, api_key: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "SLIME_BASE_URL": base_url,
        _KEY: api_key,
        **_past_the_proxy(base_url),
    }


def _past_the_proxy(base_url: str) -> dict[str, str]:
    """Have a program ask the endpoint itself, and by a proxy that the environment names only what is in the internet."""
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if others != "*":  # which stands for all hosts where nothing else is said
        others = ",".join([*others.split(","), urlsplit(base_url).hostname or ""]).strip(",")
    return {"no_proxy": others, "NO_PROXY": others}


async def _follow(process: asyncio.subprocess.Process, task: bytes, kept: bytearray) -> None:
    """Give a program its task, keep the end of its output, and wait for its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # it need not read it
        process.stdin.write(task)
        await process.stdin.drain()
    process.stdin.close()
    while piece := await process.stdout.read(65536):
        kept += piece
        del kept[: -4 * TAIL]
    await process.wait()


async def _exit(process: asyncio.subprocess.Process) -> None:
    """Wait for the exit of a program's own process; `wait()` of Python before 3.12.4 waits for its output, too (gh-119710)."""
    while process.returncode is None:
        await asyncio.sleep(_POLL_S)


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Task[None], mark: str) -> None:
    """End a program and all that it started, in sessions of its own and by parents that have ended, too."""
    with _Strays(process.pid) as strays:
        if process.returncode is None or not reading.done():
            if process.returncode is None:
                strays.add(descendants(process.pid))
            else:
                strays.add(await asyncio.to_thread(marked, mark))
            _tell(process, strays, signal.SIGTERM)
            await asyncio.wait({reading}, timeout=GRACE_S)
            if process.returncode is None:
                strays.add(descendants(process.pid))
        # What a program leaves behind has lost nothing: it is killed at once.
        _tell(process, strays, signal.SIGKILL)
        await _kill_marked(mark)
    await asyncio.wait({reading}, timeout=GRACE_S)
    reading.cancel()
    with contextlib.suppress(BaseException):
        await reading
    if process.returncode is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)


def _tell(process: asyncio.subprocess.Process, strays: _Strays, number: signal.Signals) -> None:
    """Send a signal to a program's process group, and to what has left it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    strays.send(number)


async def _kill_marked(mark: str) -> None:
    """Kill all that has a mark in its environment: one look, and others while something is found, as that may start more."""
    until = time.monotonic() + GRACE_S
    while (found := await asyncio.to_thread(marked, mark)) and time.monotonic() < until:
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        await asyncio.sleep(_POLL_S)


class _Strays:
    """Processes that have left a group, by descriptors: another one that has a number later gets no signal. Lets go with its block."""

    def __init__(self, group: int) -> None:
        self._group, self._descriptors = group, dict[int, int]()

    def __enter__(self) -> _Strays:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def add(self, pids: set[int]) -> None:
        """Take those of some processes that live, and are not in the group, which has its signals by itself."""
        for pid in pids - self._descriptors.keys():
            with contextlib.suppress(OSError):
                if os.getpgid(pid) != self._group:
                    self._descriptors[pid] = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        for descriptor in self._descriptors.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, number)
