"""What `slime doctor` says of the machine."""

from __future__ import annotations

import os

import pytest
from slime_core.cli import doctor
from slime_core.cli.machine import gpus, machine


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of that name first in PATH; returns a function that writes it."""

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return write


def test_the_machine_is_told(capsys):
    doctor.main([])
    said = capsys.readouterr().out
    for name in ("python", "system", "cores", "memory", "disk", "gpu"):
        assert f"\n  {name}: " in said
    assert "available of" in said and "free of" in said


def test_each_gpu_is_told_with_its_memory_and_driver(nvidia_smi, tmp_path):
    nvidia_smi(
        "echo 'NVIDIA H200, 143771 MiB, 143000 MiB, 570.1'; echo 'NVIDIA H200, 143771 MiB, 9 MiB, 570.1'"
    )
    assert machine(tmp_path)["gpu"] == (
        "NVIDIA H200, 143000 MiB free of 143771 MiB, driver 570.1; NVIDIA H200, 9 MiB free of 143771 MiB, driver 570.1"
    )


def test_a_gpu_whose_driver_does_not_answer_is_not_taken_for_none(nvidia_smi):
    nvidia_smi("echo 'NVIDIA-SMI has failed'; exit 9")
    assert gpus() == ["unknown: nvidia-smi: NVIDIA-SMI has failed"]


def test_a_machine_without_a_driver_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine(tmp_path)["gpu"] == "no GPU"
