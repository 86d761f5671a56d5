"""What the processes of a server leave out."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Begins as a process does that the server spawns: with the server's arguments, and its module under this name.
SPAWNED = """
import importlib.util, runpy, sys
runpy.run_module("slime_sglang.server.launch", run_name="__mp_main__", alter_sys=True)
print(importlib.util.find_spec("flashinfer") is None, "sglang" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "left_out"), [(["--device", "cpu"], True), (["--device", "cuda"], False), ([], False)]
)
def test_a_process_of_a_server_on_a_cpu_has_no_flashinfer(words, left_out):
    command = [sys.executable, "-c", SPAWNED, "--model-path", "m", *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(left_out), "False"]
