"""The sandbox's limit on memory: programs say how much they have got, and together it is never much over the limit."""

import os
import subprocess
import sys
import textwrap

import pytest
from slime_rm.code.sandbox.running import Limits, run

pytestmark = pytest.mark.timeout(120)
LIMIT = 192
HEAD = """
import ctypes, mmap, os, socket, time
libc = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20
kept = []

def got(mib=1):
    os.write(1, b"x" * mib)
    sum(range(20_000))  # some time, so that a busy machine does not decide

def everywhere(act):
    for _ in range(5):
        if os.fork() == 0:
            break
    act()
    time.sleep(1000)

def take(memory):
    kept.append(memory)
    got()
"""


def ran(source, *, limit=LIMIT, **limits):
    program = HEAD + textwrap.dedent(source)
    limits = {"wall_s": 30.0, "cpu_s": 30, **limits}
    return run({"main.py": program}, "main.py", limits=Limits(memory_bytes=limit << 20, **limits))


@pytest.mark.parametrize(
    "source",
    [
        """
        def act():
            while True: take(bytearray(b"x") * MIB)
        """,
        """
        def act():
            while True:
                mapped = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                mapped.write(b"x" * MIB)
                take(mapped)
        """,
        """
        shared = bytearray(b"x") * (60 * MIB)
        got(60)
        def act():
            for i in range(0, len(shared), MIB):
                for j in range(i, i + MIB, 4096): shared[j] = 0
                got()
        """,
        """
        libc.sbrk.restype = ctypes.c_void_p
        def act():
            while (at := libc.sbrk(MIB)) != ctypes.c_void_p(-1).value:
                ctypes.memset(at, 1, MIB)
                got()
        """,
        """
        import threading
        def fill():
            try:
                while True: take(bytearray(b"x") * MIB)
            except MemoryError:
                time.sleep(1000)
        def act():
            threading.Thread(target=fill).start()
            libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # ends this thread only
        def everywhere(act):
            for _ in range(2):
                if os.fork() == 0:
                    act()
            time.sleep(1000)
        """,
    ],
    ids=["bytes", "private mappings", "copied on write", "brk", "first thread ended"],
)
def test_the_memory_of_all_processes_together_is_limited(source):
    result = ran(source + "\n        everywhere(act)")
    assert result.ending == "memory"
    assert LIMIT / 2 < len(result.stdout) <= 1.2 * LIMIT


def may_go_first():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


@pytest.mark.skipif(not may_go_first(), reason="only who may set priorities has the watch go first")
def test_on_a_busy_machine_the_watch_goes_first():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        result = ran(
            """
            for _ in range(2):
                os.fork()
            while True: take(bytearray(b"x") * MIB)
            """
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert result.ending == "memory"
    assert len(result.stdout) <= 1.2 * LIMIT


def test_page_tables_count():
    result = ran(
        """
        libc.mmap.restype = libc.mmap.argtypes = None
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        def act():
            for i in range(20_000):  # a page, a table of pages and a table of tables each: 234 MiB
                ctypes.memset(libc.mmap((1 << 44) + (i << 30), 4096, 3, 0x100022, -1, 0), 1, 1)
                if i % 256 == 255: got()
        act()
        """
    )
    assert (result.ending, len(result.stdout) <= 1.2 * LIMIT / 3) == ("memory", True)


def test_memory_is_there_up_to_the_limit():
    assert ran("take(bytearray(b'x') * (80 * MIB)); print('fine')").stdout.endswith("fine\n")


def test_what_processes_share_counts_once():
    result = ran(
        """
        import subprocess
        shared = bytearray(b"x") * (60 * MIB)
        for _ in range(5):
            if os.fork() == 0:
                time.sleep(0.2)
                os._exit(sum(shared[i] for i in range(0, len(shared), 4096)) % 7)
            subprocess.run(["true"], check=True)  # a child that for a moment has its parent's memory
        print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5)])
        """,
    )
    assert (result.ending, result.stdout) == ("exit", f"{[15360 * ord('x') % 7] * 5}\n")


def test_memory_that_cannot_be_counted_cannot_be_had():
    expressions = [
        "os.memfd_create('m')",
        "mmap.mmap(-1, 4096)",
        "open('/dev/zero', 'r+b')",
        "open('/dev/shm/x', 'wb')",
        "libc.shmget(0, MIB, 0o1600)",
        "libc.semget(0, 1, 0o1600)",
        "libc.msgget(0, 0o1600)",
        "libc.mmap(None, 1 << 21, 3, 0x40022, -1, 0)",
        "libc.madvise(0, 4096, 21)",
        "libc.inotify_init1(0)",
        "__import__('fcntl').fcntl(os.pipe()[1], 1031, MIB)",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (-1, -1))",
    ]
    result = ran(f"""
        for expression in {expressions}:
            try:
                print(eval(expression))
            except (OSError, ValueError) as error:
                print(-1)
        """)
    assert (result.ending, result.stdout) == ("exit", "-1\n" * len(expressions))


@pytest.mark.parametrize(
    "pair",
    ["os.pipe()", "[s.detach() for s in socket.socketpair()]"],
)
def test_full_buffers_count(pair):
    result = ran(
        f"""
        def act():
            for _ in range(95):
                pair = {pair}
                os.set_blocking(pair[1], False)
                try:
                    while True: os.write(pair[1], b"x" * 4096)
                except BlockingIOError:
                    pass
        everywhere(act)
        """,
        limit=64,
        open_files=200,
        wall_s=20.0,
    )
    assert result.ending == "memory"
