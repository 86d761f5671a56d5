"""A thread that has computed leaves no idle OpenMP threads behind."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, os, threading, time
import torch
from slime_core.runtime.openmp import release_threads

torch.set_num_threads(3)
x = torch.randn(1000, 1000)
native = lambda: len(os.listdir("/proc/self/task"))
counts = []

def native_at_last():
    # Threads that are told to end do so when a busy machine gives them a core.
    deadline = time.monotonic() + 60
    while native() != counts[0] and time.monotonic() < deadline:
        os.sched_yield()
    return native()

def compute():
    counts.append(native())
    for _ in range(2):
        product = x + x
        counts.append(native())
        release_threads()
        counts.append(native_at_last())

thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(json.dumps(counts))
"""


def test_released_threads_are_gone_and_come_back():
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    before, *counts = json.loads(out)
    assert [count - before for count in counts] == [2, 0, 2, 0]


ALONE = """
import json, os, threading, time
import torch
from slime_core.runtime.openmp import compute_alone

torch.set_num_threads(3)
x = torch.randn(1000, 1000)
counts = []

def compute(alone):
    if alone:
        torch.get_num_threads()
        compute_alone()
    counts.append(len(os.listdir("/proc/self/task")))
    x + x
    counts.append(len(os.listdir("/proc/self/task")))

native = lambda: len(os.listdir("/proc/self/task"))
before = native()
for alone in (True, False):
    thread = threading.Thread(target=compute, args=(alone,))
    thread.start()
    thread.join()
    deadline = time.monotonic() + 60
    while alone and native() != before and time.monotonic() < deadline:  # a thread that was joined is there for a moment yet
        os.sched_yield()
print(json.dumps(counts))
"""


def test_a_thread_that_computes_alone_gets_no_workers_and_the_next_one_does():
    out = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True).stdout
    first, after, second, later = json.loads(out)
    assert (after - first, later - second) == (0, 2)


def test_without_libgomp_nothing_happens():
    program = "from slime_core.runtime.openmp import compute_alone, release_threads; release_threads(); compute_alone()"
    subprocess.run([sys.executable, "-c", program], check=True)
