"""`run`: runs a Python program in the sandbox and returns its output, or why it was stopped."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_core.errors import RewardError

_PACKAGES = str(Path(__file__).parents[3])
#: What the interpreter and its libraries need of the machine; what does not exist is left out.
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
_START_S = 20.0

Ending = Literal["exit", "signal", "time", "output", "memory"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use."""

    wall_s: float = 5.0
    """Time of day, seconds."""
    cpu_s: int = 5
    """Computing time of each process, seconds."""
    memory_bytes: int = 1 << 29
    """Memory of all processes together, and address space of each."""
    processes: int = 8
    """Processes and threads at once."""
    output_bytes: int = 1 << 20
    """Standard output, and as much standard error."""
    disk_bytes: int = 1 << 24
    """Files in the program's folder, all together."""
    open_files: int = 64
    """Open files of each process."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a program did."""

    ending: Ending
    """It ended by `exit` or by a `signal`, or was killed for its `time`, its `output` or its `memory`."""
    code: int
    """Exit status, or the number of the signal."""
    stdout: str
    """Standard output, at most `output_bytes`."""
    stderr: str
    """Standard error, likewise."""


class SandboxError(RewardError):
    """This machine cannot isolate a program as the sandbox must; the program was not run."""


def run(
    files: Mapping[str, str],
    main: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    folders: Sequence[str] = (),
) -> Ran:
    """Run a Python file where it can reach nothing: no file but the interpreter's, no network, no other process.

    It runs in Linux namespaces of its own (users, files, network, processes, shared memory), on a file system that is
    read-only but for a folder of a few megabytes in memory, without any capability, under resource limits and a
    filter of system calls. The memory of all its processes is counted together, many times a second.

    Args:
        files: name -> text, laid out in the program's working folder.
        main: the one of them that is run.
        stdin: standard input.
        limits: what it may use.
        folders: absolute paths, as `/app`, of further folders that it may write to, which are empty; parts of the same memory.

    Raises:
        SandboxError: a part of the isolation is not to be had here. Nothing is run without it.
    """
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux namespaces; this is {sys.platform}")
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="slime-sandbox-") as root:
        ordered, order = os.pipe()
        reported, report = os.pipe()
        process = _start(ordered, report)
        try:
            os.close(ordered)
            os.close(report)
            _write_order(order, _order(root, files, main, limits, folders))
            return _follow(process, reported, stdin.encode(), limits)
        finally:
            process.kill()  # with which process 1 of the namespace dies, and with that everything in it
            process.wait()
            os.close(reported)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def _start(order: int, report: int) -> subprocess.Popen[bytes]:
    """Start `confine` with the order and the report as descriptors 3 and 4."""
    boot = (
        f"import os, sys; os.dup2({order}, 200); os.dup2({report}, 201); os.closerange(3, 200); "
        "os.dup2(200, 3); os.dup2(201, 4); os.closerange(5, 256); "
        f"sys.path.append({_PACKAGES!r}); from slime_rm.code.sandbox.confine import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(order, report),
        start_new_session=True,
        env={"LANG": "C.UTF-8"},
    )


def _order(
    root: str, files: Mapping[str, str], main: str, limits: Limits, folders: Sequence[str]
) -> dict[str, Any]:
    interpreter = os.path.realpath(sys.executable)
    return {
        "root": root,
        "visible": [*(path for path in _SYSTEM if os.path.isdir(path)), sys.base_prefix],
        "files": dict(files),
        "folders": list(folders),
        "disk_bytes": limits.disk_bytes,
        "memory_bytes": limits.memory_bytes,
        "argv": [interpreter, "-I", "-B", f"/box/{main}"],
        "environment": {"PATH": "/usr/bin:/bin", "HOME": "/box", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
        "limits": {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_CORE": 0,
            "RLIMIT_SIGPENDING": 256,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
        },
    }


def _write_order(descriptor: int, order: Mapping[str, Any]) -> None:
    with (
        contextlib.suppress(BrokenPipeError),
        os.fdopen(descriptor, "wb") as stream,
    ):  # then it says why it ended
        stream.write(json.dumps(order).encode())


def _follow(process: subprocess.Popen[bytes], reported: int, stdin: bytes, limits: Limits) -> Ran:
    """Feed and read the program until it ends or goes too far."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    streams = {
        process.stdout.fileno(): bytearray(),
        process.stderr.fileno(): bytearray(),
        reported: bytearray(),
    }
    poll = select.poll()
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    feed, left = process.stdin.fileno(), memoryview(stdin)
    os.set_blocking(feed, False)
    poll.register(feed, select.POLLOUT)
    deadline, open_streams, ready = time.monotonic() + _START_S, set(streams), False
    ending: Ending | None = None
    while reported in open_streams and ending is None:
        wait_s = deadline - time.monotonic()
        events = poll.poll(max(0.0, wait_s) * 1000)
        if not events and wait_s <= 0:
            ending = "time"
        for descriptor, _ in events:
            if descriptor == feed:
                left = _feed(process, poll, left)
                continue
            chunk = os.read(descriptor, 1 << 16)
            streams[descriptor] += chunk
            if not chunk:
                poll.unregister(descriptor)
                open_streams.discard(descriptor)
            if descriptor != reported and len(streams[descriptor]) > limits.output_bytes:
                ending = "output"
        if not ready and b'{"ready": true}' in streams[reported]:
            ready, deadline = True, time.monotonic() + limits.wall_s
    process.kill()
    _drain(streams, open_streams - {reported}, limits)
    texts = [
        bytes(streams[stream.fileno()][: limits.output_bytes]).decode(errors="replace")
        for stream in (process.stdout, process.stderr)
    ]
    return _ran(bytes(streams[reported]), ending, ready, *texts)


def _feed(process: subprocess.Popen[bytes], poll: select.poll, left: memoryview) -> memoryview:
    """Write some of the input; close it behind the last of it, or when nobody reads."""
    assert process.stdin is not None
    try:
        left = left[os.write(process.stdin.fileno(), left) :] if left else left
    except BlockingIOError:
        return left
    except BrokenPipeError:
        left = left[:0]
    if not left:
        poll.unregister(process.stdin.fileno())
        process.stdin.close()
    return left


def _drain(streams: Mapping[int, bytearray], open_streams: set[int], limits: Limits) -> None:
    """Read what the program wrote before it ended; process 1 is dead, so each pipe ends."""
    for descriptor in open_streams:
        while len(streams[descriptor]) <= limits.output_bytes:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                break
            streams[descriptor].extend(chunk)


def _ran(report: bytes, ending: Ending | None, ready: bool, stdout: str, stderr: str) -> Ran:
    lines = [json.loads(line) for line in report.splitlines() if line.endswith(b"}")]
    said = {key: value for line in lines for key, value in line.items()}
    if "error" in said or not ready:
        why = said.get("error") or stderr.strip()[-300:] or "it did not start in time"
        raise SandboxError(f"the sandbox cannot isolate a program here ({why}); nothing was run")
    if "memory" in said:
        ending = "memory"
    if ending is not None:
        return Ran(ending=ending, code=signal.SIGKILL, stdout=stdout, stderr=stderr)
    if "status" not in said:  # process 1 was killed from outside
        return Ran(ending="signal", code=signal.SIGKILL, stdout=stdout, stderr=stderr)
    code = os.waitstatus_to_exitcode(said["status"])
    return Ran(ending="exit" if code >= 0 else "signal", code=abs(code), stdout=stdout, stderr=stderr)
