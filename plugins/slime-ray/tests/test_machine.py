"""What the processes find that a machine's actor starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTS = """
import asyncio, sys
from pathlib import Path
from slime_ray.placement.machine import Machine
from slime_ray.process.surroundings import Surroundings
folder, devices, *given = sys.argv[1:]
surroundings = Surroundings(Path(folder), (), {}, Path(folder, "machine.log"), 1)
machine = Machine(surroundings)
environment = {"CUDA_VISIBLE_DEVICES": devices, **dict(each.split("=") for each in given)}
async def main():
    await machine.start(0, ["/usr/bin/env"], environment, Path(folder, "server.log"))
    assert await machine.wait(0) == 0
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("devices", "given", "of_machine", "found"),
    [
        # No NVLink is here; a driver whose machine has one does not say so.
        ("3", [], {}, {"NCCL_NVLS_ENABLE": "0", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}),
        (
            "3",
            [],
            {"NCCL_NVLS_ENABLE": "2"},
            {"NCCL_NVLS_ENABLE": "2", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"},
        ),
        ("3", ["NCCL_NVLS_ENABLE=1"], {"NCCL_NVLS_ENABLE": "2"}, {"NCCL_NVLS_ENABLE": "1"}),
        ("", [], {}, {"NCCL_NVLS_ENABLE": None, "SGLANG_MEMORY_SAVER_CUDA_GRAPH": None}),
    ],
)
def test_a_process_with_gpus_has_the_drivers_variables_then_the_machines_then_defaults(
    monkeypatch, tmp_path, devices, given, of_machine, found
):
    for name in ("NCCL_NVLS_ENABLE", "SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in of_machine.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray does
    subprocess.run([sys.executable, "-c", STARTS, tmp_path, devices, *given], check=True, timeout=60)
    lines = (tmp_path / "server.log").read_text().splitlines()
    has = dict(line.split("=", 1) for line in lines if "=" in line)
    assert {name: has.get(name) for name in found} == found
