"""The thread that trainers and engines compute on."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from slime_core.runtime.daemon_thread import DaemonThread


def test_calls_are_made_in_turn_in_one_thread_and_errors_are_their_callers():
    thread = DaemonThread("one")
    numbers = [thread.submit(lambda i=i: (i, threading.current_thread().name)) for i in range(3)]
    assert [number.result() for number in numbers] == [(0, "one"), (1, "one"), (2, "one")]
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 / 0).result()
    thread.shutdown()
    with pytest.raises(RuntimeError, match="the thread one was shut down"):
        thread.submit(int)


def test_a_call_that_is_cancelled_before_its_turn_is_not_made():
    thread, event, made = DaemonThread("one"), threading.Event(), []
    thread.submit(event.wait)
    second = thread.submit(made.append, 2)
    thread.submit(made.append, 3)
    assert second.cancel()
    event.set()
    thread.shutdown()
    assert made == [3]


def test_calls_that_wait_are_cancelled_by_a_shutdown_that_says_so():
    thread, begun, event = DaemonThread("one"), threading.Event(), threading.Event()
    first = thread.submit(lambda: begun.set() or event.wait())
    others = [thread.submit(event.wait) for _ in range(3)]
    begun.wait()
    thread.shutdown(wait=False, cancel_futures=True)
    assert [other.cancelled() for other in others] == [True] * 3
    event.set()
    thread.shutdown()
    assert first.result()


def test_a_call_that_hangs_does_not_keep_the_process():
    program = """
import threading
from slime_core.runtime.daemon_thread import DaemonThread
DaemonThread("hangs").submit(threading.Event().wait)
print("the end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
