"""The process that calls a reward: a guard, and below it the worker proper.

The guard never runs foreign code. It forks the worker, adopts every process that the reward starts (also
those that leave the worker's session, or whose parents die), and kills them all as soon as the worker ends,
the pool closes the pipe, or the trainer is gone, however hard it was killed. The worker reads jobs and writes
replies over private descriptors: a reward prints to standard error, and its standard input is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from slime_core.errors import PluginError
from slime_core.rewards.calling import explain, is_async, load_reward
from slime_core.rewards.frames import frame, read_frame
from slime_core.rewards.results import Failed, Outcome, group_values, plain_value
from slime_core.sample import Group, Sample

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ORPHAN_CHECK_MS = 1000


def main() -> NoReturn:
    """Run the guard and, in a fork of it, the worker. Descriptors 0 and 1 are pipes of jobs and replies."""
    trainer = os.getppid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()  # this process has one thread
    if worker == 0:
        _be_worker(guard)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # the pool reads the end of the replies when the worker has ended
    ended = _watch(worker, trainer)
    killed = _kill_all(worker)  # a worker that was ending by itself has its own status, not that of the kill
    status = killed if ended is None else ended
    if os.WIFSIGNALED(status):
        os.kill(guard, os.WTERMSIG(status))  # die as the worker died, for the pool to see
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(worker: int, trainer: int) -> int | None:
    """Wait for the worker's end and return its wait status; None when the pool or trainer ends first."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(0, 0)  # only "hung up" is reported: the jobs are the worker's to read
    poll.register(awake, select.POLLIN)
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
        events = dict(poll.poll(_ORPHAN_CHECK_MS))
        if 0 in events or os.getppid() != trainer:
            return None
        if awake in events:
            os.read(awake, 4096)


def _kill_all(worker: int) -> int:
    """Kill the worker's group, then whatever is or becomes a child here. Returns the worker's status."""
    status = 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        try:
            for child in _children(os.getpid()):
                os.kill(child, signal.SIGKILL)
            ended = os.waitpid(-1, 0)
            status = ended[1] if ended[0] == worker else status
        except ProcessLookupError:
            continue
        except (ChildProcessError, PermissionError):
            return status


def _children(parent: int) -> list[int]:
    """Return the children of a process, from /proc; none where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, after_name = stat.read_text(errors="replace").rpartition(")")
            if int(after_name.split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def _be_worker(guard: int) -> NoReturn:
    """Detach from the guard's descriptors and session, then serve."""
    status = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()
        # When memory runs out, the kernel is to take this process, not the trainer.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        jobs, replies = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        sys.argv = ["slime-reward"]
        with contextlib.suppress(RuntimeError):  # there may be no standard error
            faulthandler.enable()
        serve(os.fdopen(jobs, "rb"), os.fdopen(replies, "wb"))
        status = 0
    except BrokenPipeError:  # the pool has gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # without the exit handlers of foreign modules, which may hang


def serve(jobs: BinaryIO, replies: BinaryIO) -> None:
    """Answer jobs until the stream ends. The first frame says which reward this is."""
    worker = os.getpid()
    setup = read_frame(jobs)
    if setup is None:
        return
    reference, options, memory_bytes = pickle.loads(setup[1])
    try:
        function = load_reward(reference, options)
    except PluginError as error:
        _reply(replies, 0, {"error": str(error)})
        return
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    _reply(replies, 0, {"is_async": is_async(function)})
    while (job := read_frame(jobs)) is not None:
        number, payload = job
        started = time.perf_counter()
        outcomes = _call(function, payload, options)
        if os.getpid() != worker:
            return  # the reward forked and let the copy return
        seconds = time.perf_counter() - started
        entries = [vars(o) if isinstance(o, Failed) else {"value": o} for o in outcomes]
        _reply(replies, number, {"seconds": seconds, "outcomes": entries})


def _reply(replies: BinaryIO, number: int, answer: Mapping[str, Any]) -> None:
    replies.write(frame(number, json.dumps(answer).encode()))
    replies.flush()


def _call(function: Callable[..., Any], payload: bytes, options: Mapping[str, Any]) -> list[Outcome]:
    """Call the reward on one sample, or on a group. Whatever it raises is its failure."""
    try:
        subject: Sample | Group = pickle.loads(payload)
    except Exception as error:  # unpickling runs the constructors of whatever is in metadata
        return [Failed("invalid", f"could not be given the sample: {explain(error)}")]
    count = len(subject) if isinstance(subject, list) else 1
    try:
        returned = function(subject, **options)
        if inspect.isawaitable(returned):
            what = "returned a coroutine; declare it with `async def`, or await inside"
            return [Failed("invalid", what)] * count
        return group_values(returned, count) if isinstance(subject, list) else [plain_value(returned)]
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward must not end its worker
        return [Failed("raised", f"raised {explain(error)}")] * count


if __name__ == "__main__":
    main()
