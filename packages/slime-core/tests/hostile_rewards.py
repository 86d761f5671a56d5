"""Sixty rewards that harm whom they can; each does so when its sample's response is its name."""

import atexit
import collections
import contextlib
import ctypes
import gc
import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FOREVER = ["sleep", "100000"]
HOSTILE = {}


def hostile(*kinds, **more):
    """Register a function under its name with the kinds of failure that may come of it."""

    def register(function):
        HOSTILE[function.__name__] = (function, kinds, more)
        return function

    return register


def reward(sample):
    if sample.response in HOSTILE:
        return HOSTILE[sample.response][0](sample)
    if sample.response == "garbage once it is scored":
        threading.Thread(target=lambda: (time.sleep(0.3), write_to_the_fork_servers_pipes())).start()
    if sample.response == "slow":
        time.sleep(0.6)
    return float(sample.index)


def group_reward(group):
    named = next((sample.response for sample in group if sample.response in HOSTILE), None)
    return [float(sample.index) for sample in group] if named is None else HOSTILE[named][0](group)


def fork_server():
    return os.getppid()


def guard():
    return int(Path(f"/proc/{fork_server()}/stat").read_text().rpartition(")")[2].split()[1])


def wait():
    threading.Event().wait()


def returning(name, make, *kinds):
    HOSTILE[name] = (lambda sample: make(), kinds or ("invalid", "raised"), {})


def doing(name, act, *kinds):
    HOSTILE[name] = (lambda sample: act(), kinds, {})


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return {"score": 1.0, "deep": value}


def itself():
    value = {"score": 1.0}
    value["self"] = value
    return value


class Bad:
    """Every way to look at it raises."""

    def _no(self, *_):
        raise SystemExit("no")

    __repr__ = __str__ = __float__ = __index__ = __reduce__ = __len__ = __iter__ = __bool__ = __eq__ = _no
    __hash__ = None


class BadFloat(float):
    def __float__(self):
        raise KeyboardInterrupt


class Endless(collections.abc.Mapping):
    def __getitem__(self, key):
        return 0

    def __len__(self):
        return 1

    def __iter__(self):
        while True:
            yield "key"


class Unprintable(BaseException):
    def __str__(self):
        raise KeyboardInterrupt


for name, make in {
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "nan in a dict": lambda: {"score": float("nan")},
    "infinite part": lambda: {"score": 1.0, "part": [-float("inf")]},
    "complex": lambda: 1j,
    "text": lambda: "1.0",
    "huge integer": lambda: 10**400,
    "huge integer in a dict": lambda: {"score": 1.0, "n": 10**5000},
    "object": Bad,
    "object in a dict": lambda: {"score": Bad()},
    "float that raises": lambda: BadFloat(1),
    "function": lambda: print,
    "class": lambda: Bad,
    "generator": lambda: (i for i in range(3)),
    "lone surrogate": lambda: {"score": 1.0, "why": "\ud800"},
    "lone surrogate in a key": lambda: {"score": 1.0, "\udfff": 0},
    "number as a key": lambda: {1: 1.0},
    "nested deep": lambda: nested(200),
    "nested deeper": lambda: nested(100_000),
    "contains itself": itself,
    "very long": lambda: {"score": 1.0, "text": "x" * (1 << 25)},
    "bytes": lambda: b"1",
}.items():
    returning(name, make)
returning("endless dict", Endless, "deadline")


def raise_(error):
    raise error


for name, error in {
    "exception": ValueError("\ud800 no\n\x1b[2J"),
    "base exception": Unprintable(),
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(0),
    "generator exit": GeneratorExit(),
    "memory error": MemoryError(),
    "broken pipe": BrokenPipeError(),
}.items():
    doing(name, lambda error=error: raise_(error), "raised")


def recurse():
    return recurse() + 1


doing("recursion", recurse, "raised")
doing("illegal instruction", lambda: os.kill(os.getpid(), signal.SIGILL), "crashed")
doing("segfault", lambda: ctypes.string_at(0), "crashed")
doing("abort", os.abort, "crashed")
doing("os._exit", lambda: os._exit(0), "crashed")
doing("kill itself", lambda: os.kill(os.getpid(), signal.SIGKILL), "crashed")
doing("stop itself", lambda: os.kill(os.getpid(), signal.SIGSTOP), "deadline")
doing("kill its group", lambda: os.killpg(0, signal.SIGKILL), "crashed")
doing("kill its fork server", lambda: (os.kill(fork_server(), signal.SIGKILL), wait()), "crashed")
doing("stop its fork server", lambda: (os.kill(fork_server(), signal.SIGSTOP), wait()), "crashed", "deadline")
doing("hang", wait, "deadline")
doing("spin", lambda: all(iter(int, 1)) or [0 for _ in iter(int, 1)], "deadline")
doing("memory", lambda: [mmap.mmap(-1, 1 << 26) for _ in iter(int, 1)], "raised")
doing("close everything", lambda: os.closerange(0, 256), "crashed")


@hostile("crashed")
def kill_its_guard(sample):
    subprocess.Popen(FOREVER, start_new_session=True)
    os.kill(guard(), signal.SIGKILL)
    wait()


@hostile("crashed", "deadline")
def stop_its_guard_and_fork_server(sample):
    subprocess.Popen(FOREVER, start_new_session=True)
    os.kill(guard(), signal.SIGSTOP)
    os.kill(fork_server(), signal.SIGSTOP)
    wait()


@hostile("deadline")
def swallow_signals(sample):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.Signals)
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            continue


@hostile("deadline")
def become_a_daemon(sample):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                wait()
            os._exit(0)
    wait()


@hostile("deadline", "crashed")
def fork_and_fork(sample):
    for _ in range(5):
        os.fork()
    wait()


@hostile("deadline")
def threads_that_live_on(sample):
    for _ in range(20):
        threading.Thread(target=wait).start()
    atexit.register(wait)
    wait()


@hostile("crashed")
def exit_with_a_hanging_handler(sample):
    atexit.register(wait)
    os.register_at_fork(before=wait)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    wait()


def write_everywhere(payload):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, payload)


def forge(make):
    """Write a reply to the job in flight, whose number is found where the caller keeps it."""
    frame = sys._getframe()
    while "number" not in frame.f_locals or "payload" not in frame.f_locals:
        frame = frame.f_back
    payload = make() if isinstance(make(), bytes) else json.dumps(make()).encode()
    write_everywhere(struct.pack("<QQ", len(payload), frame.f_locals["number"]) + payload)
    return 1.0


for name, make in {
    "forge deep nesting": lambda: b"[" * 100_000,
    "forge not a number": lambda: {"seconds": 0.0, "outcomes": [{"value": float("nan")}]},
    "forge another kind": lambda: {"seconds": 0.0, "outcomes": [{"kind": "fine", "what": "x"}]},
    "forge too many": lambda: {"seconds": 0.0, "outcomes": [{"value": 1.0}] * 3},
    "forge a failure of the fork server": lambda: {"failed": ["raised", "x"]},
    "forge life": lambda: {"alive": True},
    "forge what is no text": lambda: b"\xff\xfe",
}.items():
    doing(name, lambda make=make: forge(make), "crashed")


@hostile("crashed")
def write_garbage(sample):
    write_everywhere(random.Random(0).randbytes(4096))
    return 1.0


def write_to_the_fork_servers_pipes():
    for path in Path(f"/proc/{fork_server()}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("pipe:"):
                os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b"[" * 1000)


@hostile("crashed")
def write_to_the_fork_servers_descriptors(sample):
    write_to_the_fork_servers_pipes()
    wait()


@hostile("crashed", "raised", "deadline")
def patch_everything(sample):
    def broken(*_, **__):
        raise Unprintable

    json.dumps = json.JSONEncoder.encode = os.getpid = struct.pack = broken
    struct.Struct = time.perf_counter = broken
    return 1.0


@hostile("crashed", "raised", "deadline")
def ruin_its_surroundings(sample):
    os.chdir(tempfile.gettempdir())
    os.umask(0o777)
    os.environ.clear()
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_STACK):
        resource.setrlimit(limit, (0, 0))
    gc.disable()
    sys.modules.clear()
    os.kill(os.getpid(), signal.SIGXCPU)
    wait()


GROUP = {
    "too few": lambda group: [1.0] * (len(group) - 1),
    "too many": lambda group: [1.0] * (len(group) + 1),
    "one number": lambda group: 1.0,
    "a dict": lambda group: dict.fromkeys("abcd", 1.0),
    "bad list": lambda group: Bad(),
}
HOSTILE |= {name: (act, ("invalid", "raised"), {"group": True}) for name, act in GROUP.items()}
