"""The guard: what it has hold of goes with the driver, however that ends, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slime_ray.placement.guard
from slime_ray.placement.guard import Guard

#: With a child that has the name of Ray's raylet, and that has a child itself.
STARTED = """
import subprocess, sys
from slime_ray.placement.guard import Guard
guard = Guard(starts_ray=sys.argv[1] == "True")
shell = "echo raylet > /proc/$$/comm; sleep 1000 & echo $!; wait"
raylet = subprocess.Popen(["/bin/sh", "-c", shell], stdout=subprocess.PIPE, text=True)
print(raylet.pid, guard._process.pid, raylet.stdout.readline(), end="", flush=True)
sys.stdin.read()
"""

#: With a process that is begun just before the driver is killed, and is nobody's child then.
ORPHANING = """
import os, signal, subprocess, sys
from pathlib import Path
from slime_ray.placement.guard import Guard
guard = Guard(starts_ray=True)
title, clears_environment, leaves_group = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True"
orphan = subprocess.Popen(
    ["/bin/bash", "-c", 'exec -a "$0" /bin/sleep 1000', title], stdout=subprocess.DEVNULL,
    env={} if clears_environment else None, start_new_session=leaves_group,
)
while not Path(f"/proc/{orphan.pid}/cmdline").read_text().startswith(title):
    pass
print(orphan.pid, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""

DRIVER = """
import sys
from slime_ray.placement.guard import Guard
guard = Guard(starts_ray=False)
guard.watch([int(sys.argv[1])])
print("watches", flush=True)
sys.stdin.read()
"""


#: Ends at once, as at a second Ctrl-C, and says how many guards were started meanwhile.
ENDING = """
import os, time
from slime_core.runtime.processes.command_process import CommandProcess
from slime_ray.placement.guard import Guard
command = CommandProcess()
started, start = [], Guard._start
guard = Guard(starts_ray=False, is_ending=lambda: command.is_ending)
Guard._start = lambda self: started.append(1) or start(self)
leave = os._exit
def counted(status):
    time.sleep(0.2)  # in which another would be there
    print(len(started), flush=True)
    leave(status)
os._exit = counted
command.end(3)
"""


def has_ended(process, patience):
    """Whether the process that a descriptor stands for ends within so many seconds."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(patience * 1000))


def children(pid):
    """The children of a process, whichever of its threads started them."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found += map(int, file.read_text().split())
    return found


def n_held(driver):
    """How many processes the guard of a driver has hold of: the driver is one of them."""
    found = 0
    for child in children(driver):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a child that has ended
            for link in list(Path(f"/proc/{child}/fd").iterdir()):
                with contextlib.suppress(FileNotFoundError):  # a descriptor that has been closed meanwhile
                    found += os.readlink(link) == "anon_inode:[pidfd]"
    return found


def wait_until_it_holds(number, driver):
    """Wait until the guard has hold of so many processes."""
    deadline = time.monotonic() + 30
    while n_held(driver) != number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def victim():
    """A process that is stopped: it does not end by itself."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_what_it_watches_goes_with_the_driver(victim, number):
    command = [sys.executable, "-c", DRIVER, str(victim.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "watches\n"
        assert victim.poll() is None
        if number is not None:
            os.kill(driver.pid, number)
    assert victim.wait(30) == -signal.SIGKILL


def test_closing_it_ends_what_it_watches_and_twice_is_once(victim):
    guard = Guard(starts_ray=False)
    guard.watch([victim.pid])
    guard.close()
    assert victim.wait(30) == -signal.SIGKILL
    guard.close()


def test_a_guard_that_is_stopped_holds_nobody_up(victim):
    guard = Guard(starts_ray=False)
    guard._process.send_signal(signal.SIGSTOP)
    guard.watch([victim.pid])
    began = time.monotonic()
    guard.close()
    assert time.monotonic() - began < 30
    assert guard._process.returncode == -signal.SIGKILL
    assert victim.poll() is None  # the guard was never told


def test_a_guard_that_was_killed_can_be_told_and_closed(victim):
    guard = Guard(starts_ray=False)
    guard._process.kill()
    guard.watch([victim.pid])
    guard.close()
    guard.watch([victim.pid])
    guard.close()


def replaced(guard, pid):
    """Wait until another process is the guard, and return its id."""
    deadline = time.monotonic() + 30
    while guard._process.pid == pid:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return guard._process.pid


def test_a_guard_that_is_killed_has_a_successor_that_knows_what_it_knew(victim):
    guard = Guard(starts_ray=False)
    with subprocess.Popen(["sleep", "1000"]) as ended:
        guard.watch([victim.pid, ended.pid])
        ended.kill()
    pid = guard._process.pid
    for _ in range(2):
        guard._process.kill()
        pid = replaced(guard, pid)
    assert victim.poll() is None
    guard.close()
    assert victim.wait(30) == -signal.SIGKILL


def test_a_guard_that_fails_by_itself_has_none(victim, monkeypatch):
    monkeypatch.setattr(slime_ray.placement.guard, "__file__", "/missing/guard.py")
    guard = Guard(starts_ray=False)
    process = guard._process
    assert process.wait(30) > 0
    guard.watch([victim.pid])
    time.sleep(0.5)
    assert guard._process is process
    guard.close()
    assert victim.poll() is None


def successor(guard, driver):
    """Kill the guard of a driver; returns the id of the one that takes its place."""
    os.kill(guard, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        for child in children(driver):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if child != guard and b"guard.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("starts_ray", [True, False])
def test_below_a_raylet_it_kills_what_this_run_started_and_nothing_that_was_there(starts_ray, is_replaced):
    command = [sys.executable, "-c", STARTED, str(starts_ray)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        raylet, guard, agent = map(int, driver.stdout.readline().split())
        if is_replaced:
            guard = successor(guard, driver.pid)
        held, guarding = os.pidfd_open(agent), os.pidfd_open(guard)
        if starts_ray:
            wait_until_it_holds(3, driver.pid)  # the driver, the raylet and the agent below it
        driver.kill()
    assert starts_ray or has_ended(guarding, 30)  # it has done what it does
    ended = has_ended(held, 30 if starts_ray else 0.5)
    for pid in (raylet, agent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert ended == starts_ray


#: Title of an orphan, whether it clears its environment and leaves its process group, and whether it ends.
ORPHANS = [
    ("ray::RuntimeEnvAgent", True, False, True),  # with a title of its own it has no environment any more
    ("/lib/ray/agent.py", False, True, True),
    ("ray::Agent", True, True, False),  # nothing says whose it is
    ("/lib/ray/agent.py", True, False, False),
    ("another", False, False, False),
]


@pytest.fixture(scope="module")
def ended():
    """Which of the orphans have ended: all are begun at once, for those that stay are looked at for seconds."""
    held = [orphaned(*how) for *how, _ in ORPHANS]
    until = time.monotonic() + 4
    found = []
    for (_, process), (*_, ends) in zip(held, ORPHANS, strict=True):
        patience = 30 if ends else max(0.0, until - time.monotonic())
        found.append(has_ended(process, patience))
    for orphan, process in held:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
        os.close(process)
    return found


def orphaned(title, clears_environment, leaves_group):
    """Return the process whose driver was killed, and a hold of it."""
    command = [sys.executable, "-c", ORPHANING, title, str(clears_environment), str(leaves_group)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        orphan = int(driver.stdout.readline())
        held = os.pidfd_open(orphan)
        driver.stdin.write("go on\n")
    return orphan, held


@pytest.mark.parametrize(
    "number", range(len(ORPHANS)), ids=lambda number: "-".join(map(str, ORPHANS[number]))
)
def test_an_agent_that_was_never_seen_goes_with_its_driver_and_no_other_process_does(ended, number):
    *_, ends = ORPHANS[number]
    assert ended[number] == ends


@pytest.mark.parametrize(
    ("first", "told"), [("raylet", "Ray's raylet on this machine ended"), ("driver", "ended without a word")]
)
def test_it_says_why_the_driver_is_gone_where_the_driver_could_not(first, told):
    command = [sys.executable, "-c", STARTED, "True"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        raylet, *_ = map(int, driver.stdout.readline().split())
        wait_until_it_holds(3, driver.pid)
        if first == "raylet":
            os.kill(raylet, signal.SIGKILL)
            wait_until_it_holds(2, driver.pid)
        driver.kill()
        said = driver.stderr.read()
    assert said.startswith("slime: ")
    assert told in said


def test_a_driver_that_ends_at_once_starts_no_guard_again_and_says_nothing_of_being_killed():
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "0\n", "")
