"""The processes that evaluations are forked from, and what a fork that is to use a GPU has otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slime_core.runtime.processes.tree import descendants
from slime_kernels.judge.evaluator import EvaluatorSettings
from slime_kernels.sandbox.fork_server import CandidateServer
from slime_kernels.timing.gpus import KernelDevice

#: What calls CUDA in torch and Triton. A process that has called it cannot be forked from any more.
CALLS = {
    ("torch/cuda/__init__.py", "_lazy_init"),
    ("torch/cuda/__init__.py", "init"),
    ("torch/cuda/__init__.py", "is_available"),
    ("torch/cuda/__init__.py", "device_count"),
    ("torch/cuda/__init__.py", "current_device"),
    ("torch/cuda/__init__.py", "get_device_properties"),
    ("triton/backends/nvidia/driver.py", "is_active"),
    ("triton/backends/nvidia/driver.py", "_cuda_driver_is_active"),
}


class FakeGpu(KernelDevice):
    """A GPU whose device is one that every machine has."""

    @property
    def nodes(self):
        return ["/dev/zero"]


def test_what_is_done_before_the_fork_never_calls_cuda():
    from slime_kernels.sandbox import jobs
    from slime_kernels.sandbox.zygote import uses_cuda

    called = set()

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and ("torch/cuda" in path or "triton/backends" in path):
            called.add((path.split("site-packages/")[-1], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        jobs.warm()
    finally:
        sys.setprofile(None)
    assert called & CALLS == set()
    assert uses_cuda() == ""


def test_no_process_to_fork_from_has_a_device_open(fork_server):
    fork_server.start()
    processes = [fork_server.pid, *descendants(fork_server.pid)]
    assert len(processes) == 2
    opened = [os.readlink(file) for pid in processes for file in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [file for file in opened if file.startswith("/dev/nvidia")]


def open_in_a_job(server):
    """Descriptors that a job has."""
    look = """
import json, os
def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
raise ValueError(json.dumps([number for number in range(1300) if is_open(number)]))
"""
    header = {"code": look, "shapes": [{"n": 1}]}
    answer = server.call("interpret", "facts", header, limits=EvaluatorSettings().limits, gpu=None)
    return json.loads(answer.header["error"]["text"])


def test_a_job_has_no_descriptor_of_a_server_whose_process_has_many(fork_server):
    """Among them is the socket by which jobs are asked for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while held.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        many = CandidateServer()
        held.callback(many.close)
        found = open_in_a_job(many)
    assert found == open_in_a_job(fork_server)
    assert max(found) < 10


LOOK = """
import json, os, resource
files = {path: os.path.exists(path) for path in ("/dev/zero", "/sys/devices", "/proc/cpuinfo", "/proc/1/environ", "FILE", "/etc/passwd")}
try:
    open("/sys/written", "w")
except OSError as error:
    files["/sys/written"] = type(error).__name__
limit = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
raise ValueError(json.dumps([files, os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("TRITON_LIBCUDA_PATH"), os.environ.get("CUDA_DEVICE_ORDER"), limit]))
"""


@pytest.fixture
def file(tmp_path):
    """A file that everybody on this machine may read."""
    path = tmp_path / "file"
    path.write_text("")
    return str(path)


def look(fork_server, gpu, file):
    """Return what a job finds in its process."""
    header = {"code": LOOK.replace("FILE", file), "shapes": [{"n": 1}]}
    answer = fork_server.call("compile", "facts", header, limits=EvaluatorSettings().limits, gpu=gpu)
    return json.loads(answer.header["error"]["text"])


def test_a_process_with_a_gpu_sees_its_devices_and_has_no_limit_of_addresses(fork_server, file):
    gpu = FakeGpu(
        name="a GPU",
        bytes_per_us=1.0,
        cache_bytes=1,
        visible="GPU-7",
        library="/usr/lib/driver",
        order="PCI_BUS_ID",
    )
    files, visible, library, order, unlimited = look(fork_server, gpu, file)
    assert files["/dev/zero"] and files["/sys/devices"] and files["/proc/cpuinfo"]
    assert not files[file] and not files["/etc/passwd"]
    assert files["/sys/written"] in ("OSError", "PermissionError")
    assert (visible, library, order, unlimited) == ("GPU-7", "/usr/lib/driver", "PCI_BUS_ID", True)


def test_a_process_without_one_sees_none_of_that(fork_server, file):
    files, visible, library, order, unlimited = look(fork_server, None, file)
    assert not any(files[path] for path in ("/dev/zero", "/sys/devices", "/proc/cpuinfo", file))
    assert (visible, library, order, unlimited) == ("", None, None, False)


EATS = """
kept = []
while True:
    kept.append(bytearray(b"x") * (1 << 20))
    print(len(kept), flush=True)
"""


WITH_GPU = FakeGpu(name="a GPU", bytes_per_us=1.0, cache_bytes=1)


@pytest.mark.parametrize("given", [{"gpu": WITH_GPU}, {"reserves": True}], ids=["gpu", "reserves"])
def test_a_job_without_a_limit_of_addresses_is_ended_for_the_memory_that_it_uses(fork_server, given):
    header, limits = {"code": EATS, "shapes": [{"n": 1}]}, EvaluatorSettings().limits
    limits = replace(limits, memory_bytes=2 << 30)
    answer = fork_server.call("compile", "facts", header, limits=limits, **given)
    assert answer.ending == "memory"
    assert 1024 < int(answer.log.split()[-1]) <= 1.2 * 2048


def test_a_job_that_reserves_sees_no_device(fork_server, file):
    header = {"code": LOOK.replace("FILE", file), "shapes": [{"n": 1}]}
    limits = EvaluatorSettings().limits
    answer = fork_server.call("compile", "facts", header, limits=limits, reserves=True)
    files, visible, *_, unlimited = json.loads(answer.header["error"]["text"])
    assert (visible, unlimited) == ("", True)
    assert not any(files[path] for path in ("/dev/zero", "/sys/devices", "/proc/cpuinfo", file))
