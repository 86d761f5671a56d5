"""What the processes of a server leave out."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_OUT = """
import importlib.util, sys
from slime_sglang.server.launch import leave_out
leave_out(sys.argv)
print(importlib.util.find_spec("flashinfer") is None, "sglang" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "left_out"), [(["--device", "cpu"], True), (["--device", "cuda"], False), ([], False)]
)
def test_a_process_of_a_server_on_a_cpu_has_no_flashinfer(words, left_out):
    command = [sys.executable, "-c", LEFT_OUT, "--model-path", "m", *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(left_out), "False"]
