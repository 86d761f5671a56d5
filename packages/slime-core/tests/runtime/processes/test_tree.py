"""Processes below another: of every thread, of every depth, and none that has ended; and those that have its mark."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading

from slime_core.runtime.processes.tree import children_of, descendants, marked


def test_children_of_all_threads_are_found():
    started = []
    thread = threading.Thread(target=lambda: started.append(subprocess.Popen(["sleep", "1000"])))
    released = threading.Event()
    waits = threading.Thread(
        target=lambda: (started.append(subprocess.Popen(["sleep", "1000"])), released.wait())
    )
    for one in (thread, waits):
        one.start()
    thread.join()
    while len(started) < 2:
        pass
    assert {one.pid for one in started} <= set(children_of(os.getpid()))
    released.set()
    waits.join()
    for one in started:
        one.kill()
        one.wait()


def test_descendants_are_those_of_every_depth_that_live():
    program = "sleep 1000 & echo $!; exec 1>&-; wait"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        below = int(shell.stdout.readline())
        assert {shell.pid, below} <= descendants(os.getpid())
        assert descendants(shell.pid) == {below}
        shell.kill()
        os.waitid(os.P_PID, shell.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert shell.pid in children_of(os.getpid())
        assert shell.pid not in descendants(os.getpid())
        os.kill(below, 9)
    assert children_of(shell.pid) == []


ORPHAN = """
import os
if os.fork():
    os._exit(0)
os.setsid()
os.write(1, str(os.getpid()).encode())
os.close(1)
os.read(0, 1)
"""


def test_marked_are_those_that_were_started_with_the_mark_orphans_too():
    mark, pipe = secrets.token_hex(), subprocess.PIPE
    environment = {**os.environ, "SLIME_TEST_MARK": mark}
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as parent:
        orphan = int(parent.stdout.read())
        parent.wait()
        assert marked(f"SLIME_TEST_MARK={mark}") == {orphan}
        assert marked(f"SLIME_TEST_MARK={mark[:-1]}") == set()
