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


def test_without_libgomp_nothing_happens():
    program = "from slime_core.runtime.openmp import release_threads; release_threads()"
    subprocess.run([sys.executable, "-c", program], check=True)
