"""Where kernels of Triton are taken: on a GPU, if there are Triton and a C compiler."""

from __future__ import annotations

import pytest
import torch
from slime_models import triton_launch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def asked_anew():
    triton_launch._is_complete.cache_clear()
    yield
    triton_launch._is_complete.cache_clear()


def test_on_a_gpu_alone(monkeypatch, tmp_path):
    compiler = tmp_path / "gcc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (triton_launch.can_launch(CPU), triton_launch.can_launch(CUDA)) == (False, True)


@pytest.mark.parametrize("named", [None, "no-such-compiler"])
def test_without_a_c_compiler_it_says_so_once(monkeypatch, tmp_path, caplog, named):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    assert not triton_launch.can_launch(CUDA)
    assert not triton_launch.can_launch(CUDA)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("found no C compiler")
