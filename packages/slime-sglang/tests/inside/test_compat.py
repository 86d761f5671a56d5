"""When the platform `cpu_torch` applies, and what its patches change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from slime_core.errors import EngineError
from slime_sglang.inside import compat, device

#: Calls `install` in one fresh process under each condition, and prints which names it changed.
INSTALL = """
import json, multiprocessing, os, torch
from slime_sglang.inside import compat
def calls():
    return torch.cuda.synchronize, torch.Tensor.cuda, torch.cuda.cudart, multiprocessing.set_start_method
before = calls()
def changed(platform, has_cuda):
    os.environ["SGLANG_PLATFORM"] = platform
    torch.cuda.is_available = lambda: has_cuda
    compat.install()
    return [a is not b for a, b in zip(before, calls())]
print(json.dumps([changed("", False), changed("cpu_torch", True), changed("cpu_torch", False)]))
"""


def test_platform_is_active_only_when_named_and_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, has_cuda, active in (
        (None, False, False),
        (None, True, False),
        ("cuda", False, False),
        ("cpu_torch", True, False),
        ("cpu_torch", False, True),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
        if named is not None:
            monkeypatch.setenv("SGLANG_PLATFORM", named)
        assert (device.activate() is not None) == active, (named, has_cuda)


def test_entry_points_are_those_that_sglang_and_slime_look_for() -> None:
    ours = {
        group: [
            point.value
            for point in entry_points(group=group)
            if point.dist and point.dist.name == "slime-sglang"
        ]
        for group in ("sglang.srt.platforms", "sglang.srt.plugins", "slime")
    }
    assert ours == {
        "sglang.srt.platforms": ["slime_sglang.inside.device:activate"],
        "sglang.srt.plugins": ["slime_sglang.inside.compat:install"],
        "slime": ["slime_sglang.hooks"],
    }


def test_patches_apply_only_where_the_platform_is_active() -> None:
    unnamed, with_cuda, active = json.loads(
        subprocess.check_output([sys.executable, "-c", INSTALL], text=True)
    )
    assert (unnamed, with_cuda, active) == ([False] * 4, [False] * 4, [True] * 4)


ORPHAN = """
import multiprocessing, os, sys, time
from slime_sglang.inside import compat

def child(parent, report):
    while os.getppid() == parent:
        time.sleep(0.01)
    compat.install()
    os.write(report, b"survived")

context = multiprocessing.get_context("fork")
context.Process(target=child, args=(os.getpid(), int(sys.argv[1]))).start()
os._exit(0)
"""


def test_a_process_of_sglang_that_begins_without_its_parent_ends() -> None:
    reading, writing = os.pipe()
    subprocess.run([sys.executable, "-c", ORPHAN, str(writing)], pass_fds=[writing], check=True, timeout=60)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        assert report.read() == b""  # to the end of the last process that could write


FORK = """
import ctypes, multiprocessing, os, sys
os.environ["SGLANG_PLATFORM"] = "cpu_torch"
from slime_sglang.inside import compat
compat.install()
multiprocessing.set_start_method("spawn", force=True)  # as SGLang does

def child():
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
    print(multiprocessing.get_start_method(), signal.value, compat is sys.modules[compat.__name__], flush=True)

process = multiprocessing.Process(target=child)
process.start()
process.join()
"""


def test_processes_of_a_server_without_a_gpu_are_forks_that_end_with_it() -> None:
    said = subprocess.check_output([sys.executable, "-c", FORK], text=True)
    assert said.split() == ["fork", "9", "True"]


def test_patches_refuse_a_version_that_they_were_not_written_for() -> None:
    compat.check_version("0.5.23")
    compat.check_version("0.5.30.post1")
    for version in ("0.5.22", "0.6.0"):
        with pytest.raises(EngineError, match=f"found sglang {version}"):
            compat.check_version(version)
