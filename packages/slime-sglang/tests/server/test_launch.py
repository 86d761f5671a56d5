"""What the processes of a server leave out."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_OUT = """
import importlib.util, sys
from slime_sglang.server.launch import leave_out
leave_out(sys.argv)
print(*(importlib.util.find_spec(name) is None for name in ("flashinfer", "cutlass", "megatron")), "sglang" in sys.modules)
"""

TEMPORARY = """
import multiprocessing, sys, tempfile
from slime_sglang.server.launch import keep_temporary_files

def say():
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    print(tempfile.gettempdir(), cache_dir())

if __name__ == "__main__":
    keep_temporary_files(sys.argv[1])
    say()
    child = multiprocessing.get_context("spawn").Process(target=say)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("words", "left_out"), [(["--device", "cpu"], True), (["--device", "cuda"], False), ([], False)]
)
def test_a_process_of_a_server_on_a_cpu_has_no_package_of_which_it_uses_nothing(words, left_out):
    command = [sys.executable, "-c", LEFT_OUT, "--model-path", "m", *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(left_out)] * 3 + ["False"]


def test_temporary_files_go_to_the_scratch_folder_and_compiled_code_does_not(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    program = tmp_path / "program.py"
    program.write_text(TEMPORARY)
    said = subprocess.run(
        [sys.executable, program, tmp_path], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [str(tmp_path), default_cache_dir()] * 2
