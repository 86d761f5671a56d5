"""`ForkServer`: the process that forks reward workers, times each call, and replaces a worker that crashes or hangs.

A worker that crashes or hangs costs a fork, not a new interpreter: the fork server imports the reward, and forks workers
that have it. Only where the import leaves threads running, which a fork would lose, does each worker import by itself.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from slime_core.errors import PluginError
from slime_core.rewards.workers import worker
from slime_core.rewards.workers.calling import load
from slime_core.rewards.workers.guard import (
    adopt_orphans,
    cause_of_death,
    end_like,
    kill_all,
    reap,
    run_below,
    threads,
    wake_on_child,
)
from slime_core.rewards.workers.wire import (
    ALIVE,
    HEADER,
    MAX_REPLY_BYTES,
    Setup,
    frame,
    job_number,
    read_frame,
    read_reply,
)
from slime_core.runtime.processes.stacks import ask_for_stacks, own_lines

#: What the interpreter of a cold fork server runs: a descriptor and a job's number, then the import path as its arguments.
_COLD = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from slime_core.rewards.workers import fork_server; fork_server.serve_cold(*map(int, sys.argv[1:3]))"
)


_BEAT_S = 1.0
#: Files in the stacks of a worker that are not the reward's.
_NOT_A_REWARD = ("/slime_core/rewards/",)


class _Ended(Exception):
    """The worker ended, or closed its pipe; carries its wait status."""


class _Late(Exception):
    """The worker did not answer in time."""


class _Garbage(Exception):
    """The worker answered something that is no reply to its job."""


@dataclass
class _Life:
    """A worker process, and this process's ends of its pipes."""

    pid: int
    jobs: int
    replies: int
    stacks: int
    """Descriptor of the file that it writes its stacks to."""
    hello: dict[str, Any]
    status: int | None = None
    """Wait status, once it has been collected."""
    used: bool = False
    """Whether it has been given a job."""

    @property
    def place(self) -> str:
        """Say where the reward is, as far as it lets itself be asked."""
        told = ask_for_stacks([self.pid], Path(f"/proc/self/fd/{self.stacks}"))
        lines = own_lines(told, without=_NOT_A_REWARD)
        return f", at {' and '.join(lines)}" if lines else ""

    def end(self) -> _Ended:
        """Kill what is left, and return how the worker ended."""
        killed = kill_all(self.pid)
        return _Ended(killed if self.status is None else self.status)


class ForkServer:
    """Answers jobs with one worker at a time, which it forks and replaces.

    Args:
        setup: what the pool wants run.
        target: the reward, where a fork of this process may use it; None where each worker is to import it.
        private: descriptors of this process that a worker must not have.
        beat: called every second while a worker runs, so that the pool can tell that this process is not stopped.
    """

    def __init__(
        self,
        setup: Setup,
        target: Callable[..., Any] | None,
        *,
        private: Sequence[int],
        beat: Callable[[], None],
    ) -> None:
        self._setup = setup
        self._beat = beat
        self._last_beat = time.monotonic()
        self._target = target
        self._private = private
        self._awake = wake_on_child()
        self._number = 0
        self._life: _Life | None = None

    def start(self) -> dict[str, Any]:
        """Start the first worker and return its hello (`is_async` or `error`); if it crashes, this process ends the same way."""
        try:
            self._life = self._begin()
        except _Ended as end:
            end_like(end.args[0])
        except (_Late, _Garbage) as error:
            self._end()
            what = (
                "does not import in time"
                if isinstance(error, _Late)
                else f"its process sent garbage ({error})"
            )
            return {"error": f"reward {self._setup.reference}: {what}"}
        return self._life.hello

    def answer(self, payload: bytes) -> dict[str, Any]:
        """Have one subject scored; returns `{"seconds", "outcomes"}`, or `{"failed": [kind, what]}`.

        What a worker sent that is no reply may be left from the job before: the job is asked once more, as the first
        of a fresh worker, where garbage is its own.
        """
        was_used = self._life is not None and self._life.used
        try:
            return self._answer(payload)
        except _Garbage as garbage:
            self._end()
            if was_used:
                return self.answer(payload)
            return _failed("crashed", f"crashed: its process sent garbage ({garbage})")

    def _answer(self, payload: bytes) -> dict[str, Any]:
        """Have one subject scored by the worker there is, or by a new one.

        Raises:
            _Garbage: no reply, but something else came.
        """
        try:
            if self._life is not None and reap(self._life.pid) is not None:
                self._end()  # it ended after its last answer, which is no fault of this job
            if self._life is None:
                self._life = self._begin()
                if "error" in self._life.hello:
                    error = self._life.hello["error"]
                    self._end()
                    return _failed("crashed", f"could not be started again: {error}")
            self._life.used = True
            answer = self._ask(self._life, payload, self._setup.timeout_s)
            if "outcomes" not in answer:
                raise _Garbage("a reply without outcomes")
            return answer
        except _Late:
            place = "" if self._life is None else self._life.place
            self._end()
            what = f"gave no result within {self._setup.timeout_s:g} s and was killed{place}"
            return _failed("deadline", what)
        except _Ended as end:
            self._end()
            code = os.waitstatus_to_exitcode(end.args[0])
            return _failed("crashed", f"crashed: its process {cause_of_death(code)}")

    def _begin(self) -> _Life:
        """Fork a worker and wait until it has the reward."""
        jobs, replies, stacks = os.pipe(), os.pipe(), os.memfd_create("stacks of a reward")
        parent = os.getpid()
        pid = os.fork()  # this process has one thread
        if pid == 0:
            for descriptor in (*self._private, self._awake, jobs[1], replies[0]):
                os.close(descriptor)
            run_below(parent, self._worker(jobs[0], replies[1], stacks))
        os.close(jobs[0])
        os.close(replies[1])
        os.set_blocking(jobs[1], False)
        os.set_blocking(replies[0], False)
        life = _Life(pid, jobs[1], replies[0], stacks, {})
        self._life = life
        life.hello = self._receive(life, time.monotonic() + self._setup.start_timeout_s)
        return life

    def _worker(self, jobs: int, replies: int, stacks: int) -> Callable[[], None]:
        return lambda: worker.serve(
            self._setup,
            self._target,
            os.fdopen(jobs, "rb"),
            os.fdopen(replies, "wb"),
            number=self._number,
            stacks=stacks,
        )

    def _end(self) -> None:
        """Kill the worker and all that it started, and get ready for the next."""
        life, self._life = self._life, None
        if life is None:
            return
        kill_all(life.pid)
        for descriptor in (life.jobs, life.replies, life.stacks):
            os.close(descriptor)

    def _ask(self, life: _Life, payload: bytes, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        self._number = job_number()
        rest = memoryview(frame(self._number, payload))
        while rest:
            try:
                rest = rest[os.write(life.jobs, rest) :]
            except BlockingIOError:
                self._wait(life, life.jobs, select.POLLOUT, deadline)
            except BrokenPipeError:
                raise life.end() from None
        return self._receive(life, deadline)

    def _receive(self, life: _Life, deadline: float) -> dict[str, Any]:
        length, number = HEADER.unpack(self._read(life, HEADER.size, deadline))
        if number != self._number or length > MAX_REPLY_BYTES:
            raise _Garbage(f"a reply to job {number} of {length} bytes; wanted one to job {self._number}")
        try:
            return read_reply(self._read(life, length, deadline))
        except ValueError as error:
            raise _Garbage(str(error)) from None

    def _read(self, life: _Life, size: int, deadline: float) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            try:
                chunk = os.read(life.replies, size - len(chunks))
            except BlockingIOError:
                self._wait(life, life.replies, select.POLLIN, deadline)
                continue
            if not chunk:
                raise life.end()
            chunks += chunk
        return bytes(chunks)

    def _wait(self, life: _Life, descriptor: int, event: int, deadline: float) -> None:
        """Wait until a pipe is ready; a process that the reward forked may hold it open beyond the worker's end."""
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(self._awake, select.POLLIN)
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_S:
            self._last_beat = now
            self._beat()
        left = deadline - now
        ready = dict(poll.poll(max(0.0, min(left, _BEAT_S)) * 1000))
        if self._awake in ready:
            os.read(self._awake, 4096)
            status = reap(life.pid)
            life.status = life.status if status is None else status
            if life.status is not None and descriptor not in ready:
                raise life.end()
        if left <= 0 and descriptor not in ready:
            raise _Late


def serve() -> None:
    """Answer the jobs of a pool on descriptors 0 and 1 until it closes them. The first frame is the pickled `Setup`."""
    jobs, replies = _private_pipes()
    first = read_frame(jobs)
    if first is None:
        return
    number, payload = first
    setup: Setup = pickle.loads(payload)
    try:
        target = load(setup)
    except PluginError as error:
        _reply(replies, number, {"error": str(error)})
        return
    if threads() > 1:
        _restart_cold(payload, number, jobs, replies)
    _serve(setup, target, number, jobs, replies)


def serve_cold(setup: int, number: int) -> None:
    """Go on as a fork server that has not imported the reward.

    Args:
        setup: descriptor of a file with the first frame.
        number: of that frame.
    """
    with os.fdopen(setup, "rb") as file:
        _serve(pickle.load(file), None, number, *_private_pipes())


def _restart_cold(setup: bytes, number: int, jobs: BinaryIO, replies: BinaryIO) -> NoReturn:
    """Replace this process, whose threads a fork would lose, by a fresh interpreter on the same pipes."""
    descriptor, name = tempfile.mkstemp()
    os.unlink(name)
    os.write(descriptor, setup)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    os.dup2(jobs.fileno(), 0)
    os.dup2(replies.fileno(), 1)
    path = (folder or "." for folder in sys.path)
    os.execv(sys.executable, [sys.executable, "-c", _COLD, str(descriptor), str(number), *path])


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes of jobs and replies, away from where a reward reads and prints."""
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return jobs, replies


def _serve(
    setup: Setup, target: Callable[..., Any] | None, number: int, jobs: BinaryIO, replies: BinaryIO
) -> None:
    adopt_orphans()
    server = ForkServer(
        setup,
        target,
        private=(jobs.fileno(), replies.fileno()),
        beat=lambda: _reply(replies, number, ALIVE),
    )
    _reply(replies, number, server.start())
    while (job := read_frame(jobs)) is not None:
        number, payload = job
        for entry in pickle.loads(payload):
            _reply(replies, number, server.answer(entry))


def _reply(replies: BinaryIO, number: int, answer: Mapping[str, Any]) -> None:
    replies.write(frame(number, json.dumps(answer).encode()))
    replies.flush()


def _failed(kind: str, what: str) -> dict[str, Any]:
    return {"failed": [kind, what]}
