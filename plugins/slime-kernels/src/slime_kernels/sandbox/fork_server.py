"""`CandidateServer`: fresh, sandboxed processes that have torch and Triton already imported."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_rm.code.sandbox.running import Ending, Limits, SandboxError, follow, order

from slime_kernels.sandbox.messages import pack, unpack
from slime_kernels.timing.gpus import KernelDevice

#: Where jobs run: `compile` has Triton's compiler, with a driver without a GPU or, in jobs on a GPU, its own; `interpret` its interpreter.
Kind = Literal["compile", "interpret"]
KINDS: tuple[Kind, ...] = ("compile", "interpret")
_START_S = 120.0
_LOG_BYTES = 1 << 16
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, kw_only=True)
class CandidateAnswer:
    """What became of a job."""

    ending: Ending
    """How its process ended; `exit` where it answered."""
    header: dict[str, Any] | None
    """What it answered; None where it did not, or where what came was not from the job."""
    buffers: Sequence[bytes] = ()
    log: str = ""
    """The end of what it printed."""
    forged: bool = False
    """Something was written where only the job may write."""


class CandidateServer:
    """A process that has imported torch and Triton once, and whose forks, a fresh one a job, are confined before they work.

    It is started by the first job, and ends with this process. Threads may call it side by side.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: dict[Kind, socket.socket] = {}

    def call(
        self,
        kind: Kind,
        job: str,
        header: dict[str, Any],
        buffers: Sequence[bytes] = (),
        *,
        limits: Limits,
        gpu: KernelDevice | None = None,
        reserves: bool = False,
    ) -> CandidateAnswer:
        """Run a job of `jobs.JOBS` in a fresh process and return its answer; blocks until then.

        The answer carries a number that the job is given and that is drawn anew each time; without it, it is none.
        With a GPU the process sees its devices, `/sys`, a `/proc`, and the C compiler that Triton builds launchers with, may make the calls that the driver makes
        (`slime_rm.code.sandbox.drivers`), and its address space has no limit, as CUDA reserves more than there is memory; everything
        else holds as without, and its memory is counted all the same. Nor has it where the job `reserves`: where it makes tensors as large as
        the problem is, of whose pages it uses few.

        Raises:
            SandboxError: this machine cannot isolate a process, or the server does not start. Nothing was run.
        """
        nonce = secrets.token_hex(16)
        message = pack({"nonce": nonce, "job": job, **header}, buffers)
        with tempfile.TemporaryDirectory(prefix="slime-kernels-") as root, contextlib.ExitStack() as stack:
            pipes = [os.pipe() for _ in range(5)]  # input, output, errors, report, answer
            theirs = [pipes[0][0], *(write for _, write in pipes[1:])]
            ours = [pipes[0][1], *(read for read, _ in pipes[1:])]
            feed = stack.enter_context(os.fdopen(ours[0], "wb", buffering=0))
            for descriptor in ours[1:]:
                stack.callback(os.close, descriptor)
            nodes = [] if gpu is None else gpu.nodes
            shown: list[str] = []
            visible, compiler = [sys.prefix], None
            if nodes:
                compiler = c_compiler(os.environ)
                shown = [*nodes, "/sys"]
                visible += [] if compiler is None else _installed_in(compiler)
            wanted = order(
                root, {}, "candidate.py", limits, visible=visible, shown=shown, for_driver=bool(nodes)
            )
            if gpu is not None and nodes:
                wanted["gpu"] = {"CUDA_VISIBLE_DEVICES": gpu.visible, "TRITON_LIBCUDA_PATH": gpu.library}
                wanted["gpu"] |= {"CUDA_DEVICE_ORDER": gpu.order} if gpu.order else {}
                wanted["gpu"] |= {} if compiler is None else {"CC": str(compiler)}
            wanted["reserves"] = reserves or bool(nodes)
            process = self._fork(kind, wanted, theirs)
            stack.callback(os.close, process)
            outputs = {ours[1]: _LOG_BYTES, ours[2]: _LOG_BYTES, ours[4]: limits.output_bytes}

            def kill() -> None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)

            try:
                followed = follow(kill, ours[3], outputs, feed=feed, stdin=message, wall_s=limits.wall_s)
            finally:
                kill()
        log = (followed.output[ours[1]] + followed.output[ours[2]]).decode(errors="replace")[-2000:]
        said, found, forged = _read(followed.output[ours[4]], nonce)
        return CandidateAnswer(ending=followed.ending, header=said, buffers=found, log=log, forged=forged)

    def start(self) -> None:
        """Start the server, where it is not running.

        Raises:
            SandboxError: it does not start.
        """
        with self._lock:
            self._running("compile")

    @property
    def pid(self) -> int | None:
        """The process whose forks work; None where it does not run."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the server and what it runs."""
        with self._lock:
            self._close_sockets()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _fork(self, kind: Kind, wanted: dict[str, Any], descriptors: list[int]) -> int:
        """Have a fork made that follows the order; returns a descriptor of it. Closes the descriptors."""
        try:
            with self._lock:
                control = self._running(kind)
                try:
                    socket.send_fds(control, [json.dumps(wanted).encode()], descriptors)
                    said, fds, _, _ = socket.recv_fds(control, 1 << 10, 1)
                except OSError as error:
                    self._process = None
                    raise SandboxError(f"the process that kernels are forked from died ({error})") from error
                if not fds:
                    self._process = None
                    raise SandboxError(
                        f"the process that kernels are forked from made none ({said.decode()[:100]})"
                    )
                return fds[0]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _close_sockets(self) -> None:
        """Close those of a server that has ended, or is to end."""
        for each in self._sockets.values():
            each.close()
        self._sockets = {}

    def _running(self, kind: Kind) -> socket.socket:
        if self._process is not None and self._process.poll() is None:
            return self._sockets[kind]
        self._close_sockets()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in KINDS]
        fds = [theirs.fileno() for _, theirs in pairs]
        path = [one for one in sys.path if one]  # of `-I` alone, packages in PYTHONPATH would be missing
        program = f"import sys; sys.path += {path!r}; from slime_kernels.sandbox.zygote import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", program, str(os.getpid()), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_ENVIRONMENT,
        )
        for one, (ours, theirs) in zip(KINDS, pairs, strict=True):
            theirs.close()
            self._sockets[one] = ours
            ours.settimeout(_START_S)
            try:
                if ours.recv(16) == b"ready":
                    continue
                why = "it ended"
            except OSError as error:
                why = str(error)
            self._process.kill()
            self._process = None
            raise SandboxError(f"the process that kernels are forked from does not start ({why})")
        return self._sockets[kind]


def _read(message: bytes, nonce: str) -> tuple[dict[str, Any] | None, Sequence[bytes], bool]:
    """Return (header, buffers, whether something else was written)."""
    if not message:
        return None, (), False
    try:
        header, buffers = unpack(message)
        if header.pop("nonce", None) == nonce:
            return header, buffers, False
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None, (), True


def c_compiler(environment: Mapping[str, str]) -> Path | None:
    """Return the C compiler that Triton builds its launchers with: `CC`, or gcc or clang of `PATH`; None where there is none."""
    named = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    found = next(filter(None, (shutil.which(name, path=environment.get("PATH")) for name in named)), None)
    return None if found is None else Path(found).absolute()


def _installed_in(compiler: Path) -> list[str]:
    """Return the folders of a compiler that the system's do not hold."""
    folders = {compiler.parent.parent, compiler.resolve().parent.parent}
    return sorted(str(each) for each in folders if each not in (Path("/"), Path("/usr")))
