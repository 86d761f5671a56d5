"""The processes that evaluations are forked from: torch and Triton are imported here, once, and nothing else ever runs here.

Two of them, as whether Triton's functions are interpreted is decided when it is imported: the compiling one, and its child,
the interpreting one. Each forks on request; a fork confines itself (`slime_rm.code.sandbox.confine`) before it reads what
it is to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_ANSWER = 5
_N_STREAMS = 5
_AWAY = 300


def main() -> NoReturn:
    """Import, and serve the sockets that the command line gives."""
    parent, compiling, interpreting = map(int, sys.argv[1:4])
    _end_with(parent)
    import torch  # before the fork: most of the memory is then shared

    torch.set_num_threads(1)
    me = os.getpid()
    if os.fork() == 0:
        _end_with(me)
        os.environ["TRITON_INTERPRET"] = "1"
        os.close(compiling)
        _serve(interpreting)
    os.close(interpreting)
    _serve(compiling)


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _serve(descriptor: int) -> NoReturn:
    from slime_kernels.sandbox import jobs

    jobs.warm()
    gc.collect()
    gc.freeze()  # a fork that collects would otherwise copy all pages that have objects
    control = socket.socket(fileno=descriptor)
    if (n := len(os.listdir("/proc/self/task"))) != 1:
        print(f"slime-kernels: the process to fork from has {n} threads; wanted 1", file=sys.stderr)
        os._exit(1)
    if found := uses_cuda():
        print(f"slime-kernels: the process to fork from uses CUDA ({found}); wanted none", file=sys.stderr)
        os._exit(1)
    baseline = _bytes("smaps_rollup", "Pss"), _bytes("status", "VmSize")
    control.send(b"ready")
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        ready = poll.poll(500)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 16, _N_STREAMS)
        if not request:
            os._exit(0)
        child = os.fork()
        if child == 0:
            _confined(json.loads(request), descriptors, baseline)
        for each in descriptors:
            os.close(each)
        handle = os.pidfd_open(child)
        socket.send_fds(control, [b"forked"], [handle])
        os.close(handle)


def _confined(order: dict[str, Any], descriptors: list[int], baseline: tuple[int, int]) -> NoReturn:
    """Confine this fork and do the job that standard input gives.

    What it shares with others does not count as its memory: as `confine` counts pages, that is less of them than the process forked from has.
    """
    from slime_rm.code.sandbox.confine import REPORT, confine

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGUSR1:
        signal.signal(number, signal.SIG_DFL)
    away = [fcntl.fcntl(each, fcntl.F_DUPFD, _AWAY) for each in descriptors]
    for each, place in zip(away, (0, 1, 2, REPORT, _ANSWER), strict=True):
        os.dup2(each, place)
    # The sockets have the numbers that they had where this server was started.
    for each in map(int, os.listdir("/proc/self/fd")):
        if each > 2 and each not in (REPORT, _ANSWER):
            with contextlib.suppress(OSError):  # that of the folder that was listed
                os.close(each)
    if order["reserves"]:
        del order["limits"]["RLIMIT_AS"]
    else:
        order["limits"]["RLIMIT_AS"] = order["memory_bytes"] + baseline[1]
    order["memory_bytes"] += baseline[0]
    confine(order, _work, kept=(_ANSWER,))


def _work(starting: int, order: dict[str, Any]) -> NoReturn:
    os.close(starting)
    caches = dict.fromkeys(["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"], "/box/cache")
    # A name for the user, who is in no list: PyTorch's compiler asks for one.
    os.environ |= {
        "HOME": "/box",
        "TMPDIR": "/box",
        "USER": "nobody",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **caches,
    }
    os.environ |= order.get("gpu", {})
    tempfile.tempdir = "/box"
    os.chdir("/box")
    from slime_kernels.sandbox import jobs

    jobs.work(_ANSWER)
    os._exit(0)


def uses_cuda() -> str:
    """Return by what this process uses CUDA, so that a fork of it could not; nothing where it does not."""
    import torch

    if torch.cuda.is_initialized():
        return "torch"
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (file := os.readlink(f"/proc/self/fd/{each}")).startswith("/dev/nvidia"):
                return file
    return ""


def _bytes(file: str, field: str) -> int:
    """Return the bytes that a line of a file about this process tells."""
    lines = (line.partition(":") for line in Path(f"/proc/self/{file}").read_text().splitlines())
    return next(int(value.split()[0]) << 10 for name, _, value in lines if name == field)
