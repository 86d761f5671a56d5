"""Where another process is: asked while it sleeps in Python, and while native code holds its interpreter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from slime_core.runtime.processes.stacks import ask_for_stacks, own_lines

PROGRAM = """
import re, sys, threading, time
from slime_core.runtime.processes.stacks import write_stacks_when_asked

def sleeps():
    time.sleep(1000)

def searches():
    re.fullmatch("(a|aa)*b", 200 * "a")  # backtracks for ever, and lets no other thread run

def descends(depth=80):
    descends(depth - 1) if depth else sleeps()

log = open(sys.argv[1], "a")
write_stacks_when_asked(log)
threading.Thread(target=sleeps, daemon=True).start()
print("ready", file=log, flush=True)
{what}()
"""


@pytest.fixture
def process(tmp_path):
    """Return a function that starts a program, with its log."""
    started = []
    log = tmp_path / "log"

    def start(what):
        script = tmp_path / "program.py"
        script.write_text(PROGRAM.replace("{what}", what))
        started.append(subprocess.Popen([sys.executable, str(script), str(log)]))
        deadline = time.monotonic() + 30
        while not log.exists() or "ready" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return started[-1], log, script

    yield start
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.parametrize(("what", "line"), [("sleeps", 6), ("searches", 9)])
def test_each_thread_is_told_with_its_own_innermost_line(process, what, line):
    child, log, script = process(what)
    expected = {f"{script}:6 in sleeps", f"{script}:{line} in {what}"}
    deadline = time.monotonic() + 30
    while (
        found := set(own_lines(ask_for_stacks([child.pid], log)))
    ) != expected:  # it may be on its way there
        assert time.monotonic() < deadline, found
    assert log.read_text().startswith("ready\n")
    assert set(own_lines(ask_for_stacks([child.pid], log), without=("program",))) == set()
    assert child.poll() is None


def test_a_process_that_is_stopped_or_gone_tells_nothing(process):
    child, log, _ = process("sleeps")
    os.kill(child.pid, signal.SIGSTOP)
    assert ask_for_stacks([child.pid], log) == ""
    child.kill()
    child.wait()
    assert ask_for_stacks([child.pid], log) == ""


def test_a_process_that_does_not_know_the_signal_is_left_alone(tmp_path):
    (tmp_path / "log").touch()
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert ask_for_stacks([child.pid], tmp_path / "log") == ""
        assert child.poll() is None
        child.kill()


def test_stacks_of_several_processes_do_not_mix(process):
    """Of 80 calls each: to write them takes so long that processes that are asked at once write into each other's lines."""
    children = []
    for _ in range(4):
        child, log, script = process("descends")
        children.append(child.pid)
        log.write_text("")  # the next one is waited for
    told = ask_for_stacks(children, log)
    threads = re.split(r"^(?=Thread|Current thread)", told, flags=re.MULTILINE)[1:]
    assert len(threads) == 2 * len(children)
    mains = [thread for thread in threads if "in descends" in thread]
    assert [thread.count("in descends\n") for thread in mains] == [81] * len(children), told
    assert told.count(f'"{script}", line 6 in sleeps\n') == 2 * len(children)
