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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from slime_core.errors import RewardError

from slime_rm.code.sandbox.drivers import FILES

_PACKAGES = str(Path(__file__).parents[3])
#: What the interpreter and its libraries need of the machine; what does not exist is left out.
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
_START_S = 20.0
_REPORT_BYTES = 1 << 16
#: What `confine` reports once the program has started.
_READY = b'{"ready": true}'

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
        ordered, ordering = os.pipe()
        reported, report = os.pipe()
        process = _start(ordered, report)
        try:
            os.close(ordered)
            os.close(report)
            _write_order(ordering, order(root, files, main, limits, folders=folders))
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            out, err = process.stdout.fileno(), process.stderr.fileno()
            with process.stdin as feed:
                followed = follow(
                    process.kill,
                    reported,
                    {out: limits.output_bytes, err: limits.output_bytes},
                    feed=feed,
                    stdin=stdin.encode(),
                    wall_s=limits.wall_s,
                )
            texts = [followed.output[stream].decode(errors="replace") for stream in (out, err)]
            return Ran(ending=followed.ending, code=followed.code, stdout=texts[0], stderr=texts[1])
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
        # Nothing else is open, so the copies are low, and that of the report is not 3: it is still there when 4 is made of it.
        f"import os, sys; order, report = os.dup({order}), os.dup({report}); os.close({order}); os.close({report}); "
        "os.dup2(order, 3); os.dup2(report, 4); os.closerange(5, 16); "
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


def order(
    root: str,
    files: Mapping[str, str],
    main: str,
    limits: Limits,
    *,
    folders: Sequence[str] = (),
    visible: Sequence[str] = (),
    shown: Sequence[str] = (),
    for_driver: bool = False,
    address_space_bytes: int | None = None,
) -> dict[str, Any]:
    """Return what `confine` is to do.

    Drivers of devices want `shown` and `for_driver`; nothing else does.

    Args:
        root: an empty folder, in whose place the program's file system comes.
        files: name -> text, laid out in the program's working folder.
        main: the one of them that is run.
        limits: what the program may use.
        folders: that it may write to, too.
        visible: folders that it sees besides those of the interpreter and the system.
        shown: devices, files and folders that it sees at their own places, besides `/dev/null`, `random` and `urandom`.
        for_driver: it calls a GPU's driver, and is allowed what that needs (`drivers`): some system calls, and a `/proc` with its own
            processes, or, where the machine is a container that may not mount one, files on the machine, with which CUDA's driver
            fails since version 570.
        address_space_bytes: of each process; the memory of all where not given.
    """
    interpreter = os.path.realpath(sys.executable)
    files_of_driver = filter(os.path.exists, FILES if for_driver else ())
    return {
        "root": root,
        "visible": [*(path for path in _SYSTEM if os.path.isdir(path)), sys.base_prefix, *visible],
        "shown": [*shown, *files_of_driver],
        "for_driver": for_driver,
        "files": dict(files),
        "folders": list(folders),
        "disk_bytes": limits.disk_bytes,
        "memory_bytes": limits.memory_bytes,
        "argv": [interpreter, "-I", "-B", f"/box/{main}"],
        "environment": {"PATH": "/usr/bin:/bin", "HOME": "/box", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
        "limits": {
            "RLIMIT_AS": address_space_bytes or limits.memory_bytes,
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


@dataclass(frozen=True, kw_only=True)
class Followed:
    """How a program ended, and what it wrote."""

    ending: Ending
    code: int
    """Exit status, or the number of the signal."""
    output: Mapping[int, bytes]
    """Of each descriptor that was read, at most the bytes that it was allowed."""


def follow(
    kill: Callable[[], None],
    reported: int,
    outputs: Mapping[int, int],
    *,
    feed: IO[bytes],
    stdin: bytes,
    wall_s: float,
) -> Followed:
    """Feed and read a confined program until it ends or goes too far.

    Args:
        kill: ends the process that `confine` confined, and with it all of the program's.
        reported: where `confine` reports.
        outputs: descriptors to read, and the bytes that the program may write to each.
        feed: its standard input.
        stdin: what is written there.
        wall_s: time of day that it has, seconds.

    Raises:
        SandboxError: the confinement could not be built; nothing was run.
    """
    streams = {descriptor: bytearray() for descriptor in (*outputs, reported)}
    poll = select.poll()
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    left = memoryview(stdin)
    os.set_blocking(feed.fileno(), False)
    feeding = feed.fileno()
    poll.register(feeding, select.POLLOUT)
    deadline, open_streams, ready = time.monotonic() + _START_S, set(streams), False
    ending: Ending | None = None
    while reported in open_streams and ending is None:
        wait_s = deadline - time.monotonic()
        events = poll.poll(max(0.0, wait_s) * 1000)
        if not events and wait_s <= 0:
            ending = "time"
        for descriptor, _ in events:
            if descriptor == feeding:
                left = _feed(feed, poll, left)
                continue
            chunk = os.read(descriptor, 1 << 16)
            streams[descriptor] += chunk
            if not chunk:
                poll.unregister(descriptor)
                open_streams.discard(descriptor)
            if len(streams[descriptor]) > outputs.get(descriptor, _REPORT_BYTES):
                ending = "output"
        if not ready and _READY in streams[reported]:
            ready, deadline = True, time.monotonic() + wall_s
    ready = ready or (ending == "output" and _started(reported, streams[reported], deadline))
    kill()
    _drain(streams, open_streams - {reported}, outputs)
    output = {descriptor: bytes(streams[descriptor][:most]) for descriptor, most in outputs.items()}
    return _followed(bytes(streams[reported]), ending, ready, output)


def _started(reported: int, report: bytearray, deadline: float) -> bool:
    """Wait for the word that the program has started: process 1 sends it when it has, and a flood of output may be there before."""
    poll = select.poll()
    poll.register(reported, select.POLLIN)
    while _READY not in report:
        if len(report) > _REPORT_BYTES or not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        chunk = os.read(reported, 1 << 16)
        if not chunk:
            return False
        report += chunk
    return True


def _feed(feed: IO[bytes], poll: select.poll, left: memoryview) -> memoryview:
    """Write some of the input; close it behind the last of it, or when nobody reads."""
    try:
        left = left[os.write(feed.fileno(), left) :] if left else left
    except BlockingIOError:
        return left
    except BrokenPipeError:
        left = left[:0]
    if not left:
        poll.unregister(feed.fileno())
        feed.close()
    return left


def _drain(streams: Mapping[int, bytearray], open_streams: set[int], outputs: Mapping[int, int]) -> None:
    """Read what the program wrote before it ended; process 1 is dead, so each pipe ends."""
    for descriptor in open_streams:
        while len(streams[descriptor]) <= outputs[descriptor]:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                break
            streams[descriptor].extend(chunk)


def _followed(report: bytes, ending: Ending | None, ready: bool, output: dict[int, bytes]) -> Followed:
    lines = [json.loads(line) for line in report.splitlines() if line.endswith(b"}")]
    said = {key: value for line in lines for key, value in line.items()}
    if "error" in said or not (
        ready or "memory" in said
    ):  # who is killed at once has not told that it was ready
        told = b"".join(output.values()).decode(errors="replace").strip()[-300:]
        silent = (
            "it did not start in time" if ending == "time" else "its process ended before the program began"
        )
        why = said.get("error") or told or silent
        raise SandboxError(f"the sandbox cannot isolate a program here ({why}); nothing was run")
    if "memory" in said:
        ending = "memory"
    if ending is not None:
        return Followed(ending=ending, code=signal.SIGKILL, output=output)
    if "status" not in said:  # process 1 was killed from outside
        return Followed(ending="signal", code=signal.SIGKILL, output=output)
    code = os.waitstatus_to_exitcode(said["status"])
    return Followed(ending="exit" if code >= 0 else "signal", code=abs(code), output=output)
