"""Rewards, good and bad, that the tests of the pool run in worker processes."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

FOREVER = ["sleep", "100000"]


def length(sample, *, scale=1.0):
    return scale * len(sample.response)


def returned(sample):
    """Return the value that the response spells in Python."""
    return eval(sample.response)


def acting(sample):
    """Do what the response says."""
    return ACTIONS[sample.response](sample)


def hang(sample):
    threading.Event().wait()


def raise_error(sample):
    raise ValueError("no answer\nin the response")


def raise_unprintable(sample):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    raise Unprintable


def eat_memory(sample):
    return len(bytearray(1 << 40))


def print_loudly(sample):
    print("noise on stdout")
    os.write(1, b"\x00" * 100)
    subprocess.run([sys.executable, "-c", "print('noise of a child')"], check=True)
    return 1.0


def read_standard_input(sample):
    return float(len(sys.stdin.read()))


def start_orphan():
    """Start a process in a session of its own whose parent ends at once; return its id."""
    ours, theirs = os.pipe()
    parent = os.fork()
    if parent == 0:
        process = subprocess.Popen(FOREVER, start_new_session=True)
        os.write(theirs, str(process.pid).encode())
        os._exit(0)
    os.waitpid(parent, 0)
    return int(os.read(ours, 20))


def spawn_and_hang(sample):
    """Start a child, one in a session of its own, and an orphan; write their ids down; hang."""
    children = [subprocess.Popen(FOREVER), subprocess.Popen(FOREVER, start_new_session=True)]
    pids = [os.getpid(), *(child.pid for child in children), start_orphan()]
    Path(sample.metadata["pids"]).write_text(json.dumps(pids))
    threading.Event().wait()


def spawn_and_crash(sample):
    child = subprocess.Popen(FOREVER, start_new_session=True)
    Path(sample.metadata["pids"]).write_text(json.dumps([os.getpid(), child.pid]))
    os._exit(3)


def fork_and_return(sample):
    """Fork, and let parent and child both return."""
    return 1.0 if os.fork() else 2.0


def close_descriptors(sample):
    os.closerange(3, 100)
    return 1.0


def change_sample(sample):
    sample.metadata["seen"] = True
    sample.response = "changed"
    return 1.0


ACTIONS = {
    "ok": lambda sample: 1.0,
    "process": lambda sample: os.getpid(),
    "hang": hang,
    "raise": raise_error,
    "raise unprintable": raise_unprintable,
    "exit": lambda sample: os._exit(3),
    "sys.exit": lambda sample: sys.exit("no"),
    "segfault": lambda sample: ctypes.string_at(0),
    "kill": lambda sample: os.kill(os.getpid(), signal.SIGKILL),
    "eat memory": eat_memory,
    "print": print_loudly,
    "read": read_standard_input,
    "spawn and hang": spawn_and_hang,
    "spawn and crash": spawn_and_crash,
    "fork": fork_and_return,
    "close": close_descriptors,
    "change": change_sample,
}


def lengths(group):
    return [len(sample.response) for sample in group]


def group_returned(group):
    return eval(group[0].response)


async def acting_async(sample):
    if sample.response == "hang":
        await asyncio.Event().wait()
    if sample.response == "hang stubbornly":
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if sample.metadata["patience"].pop() == 0:
                    raise
    if sample.response == "sys.exit":
        sys.exit("no")
    if sample.response == "cancel":
        raise asyncio.CancelledError
    if sample.response == "interrupt":
        raise KeyboardInterrupt
    return acting(sample)


class AsyncJudge:
    async def __call__(self, sample, *, bonus=0.0):
        return 2.0 + bonus


class OneAtATime:
    connections = 1

    def __init__(self):
        self._slots = asyncio.Semaphore(1)

    async def __call__(self, sample):
        async with self._slots:
            await asyncio.sleep(2)
        return 1.0


judge = AsyncJudge()
not_a_function = 3


async def _coroutine():
    return 1.0


def forgets_to_await(sample):
    coroutine = _coroutine()
    coroutine.close()
    return coroutine
