"""What `slime doctor` says of the machine."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from types import SimpleNamespace

import pytest
from slime_core.cli import doctor
from slime_core.cli.machine import gpus, machine, name_lookup, ports, shared_memory
from slime_core.devices.cuda_variables import CUDA_VARIABLES


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
    for name in (
        "python", "system", "cores", "memory", "disk", "shared memory", "ports", "gpu", "links of GPUs",
    ):  # fmt: skip
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


def test_what_joins_the_gpus_is_told(nvidia_smi, tmp_path):
    nvidia_smi('[ "$1" = topo ] && printf "\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n"')
    assert machine(tmp_path)["links of GPUs"] == "NV18 between all 2 GPUs"
    nvidia_smi("echo no driver; exit 1")
    assert machine(tmp_path)["links of GPUs"] == "unknown: nvidia-smi: no driver"


def test_a_port_that_somebody_listens_on_is_taken():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert ports({port: "here"}).endswith(f" for servers and ranks; {port} (here) taken")
    assert ports({port: "here"}).endswith(f"{port} (here) free")


def test_a_name_server_that_does_not_answer_is_told_of():
    def fails():
        raise OSError("no server")

    assert re.fullmatch(r"0\.0\d\d s to look up an address's name", name_lookup(lambda: None))
    slow = name_lookup(lambda: time.sleep(0.6))
    assert "ranks wait so long for each connection; see that the name server" in slow
    assert name_lookup(fails) == "an address's name is not to be had: no server"


def test_a_machine_without_shared_memory_or_proc_is_told_of(tmp_path):
    assert shared_memory(tmp_path / "none") == f"none: {tmp_path}/none: No such file or directory"
    assert ports({}, tmp_path / "none") == "? to ? for servers and ranks"


def told(capsys, *words):
    """Return the exit status, and what `--json` prints."""
    status = doctor.main(["--json", *map(str, words)])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def bare(monkeypatch):
    """An environment in which no variable of CUDA is set."""
    for variable in CUDA_VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    return monkeypatch


def test_variables_are_told_with_who_says_so(bare, capsys, tmp_path):
    bare.setenv("PATH", str(tmp_path))  # without nvidia-smi
    bare.setenv("NCCL_NVLS_ENABLE", "2")
    bare.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    recipe = tmp_path / "a.toml"
    recipe.write_text("""[model]
hf_checkpoint = "none"
[rollout]
rollout_batch_size = 1
rollout_max_response_len = 8
[run]
launcher = "ray"
[cluster.train_env_vars]
CUDA_DEVICE_MAX_CONNECTIONS = "32"
""")
    _, found = told(capsys, recipe)
    variables = found["variables"]
    variables.pop("on this machine", None)  # it may have a GPU
    assert variables == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "trainer 32 (by --train-env-vars)",
        "NCCL_CUMEM_ENABLE": "trainer 0 (by slime)",
        "NCCL_NVLS_ENABLE": "trainer 2 (by this environment), server 2 (by this environment)",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "trainer 1 (by slime)",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "server 1 (by slime)",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "server 0 (by slime)",
    }


def test_what_nothing_but_text_was_before_is_one_json_object(capsys):
    status, found = told(capsys)
    assert (status, found["problems"]) == (0, [])
    assert list(found) == ["machine", "packages", "versions", "variables", "problems"]
    assert re.fullmatch(r"[0-9.]+", found["packages"]["slime-core 0.1.0"]["numpy"])


def test_what_a_plugin_requires_is_read_in_every_form_and_where_it_is_meant(monkeypatch, capsys):
    requires = [
        "packaging (>=1,<999)",
        "pluggy; python_version > '3'",
        "pywin32>=300; sys_platform == 'win32'",
        "nothing-of-this-name @ git+https://example.org/nothing",
        "numpy>=99; extra == 'new'",
        "pydantic>=99",
        "two words",
    ]
    mine = SimpleNamespace(name="slime-mine", version="1.0", requires=requires)
    monkeypatch.setattr(doctor, "distributions", lambda: [mine])
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rows = found["packages"]["slime-mine 1.0"]
    assert set(rows) == {"packaging", "pluggy", "nothing-of-this-name", "pydantic", "two words"}
    assert rows["nothing-of-this-name"] == "found nothing; wanted any version"
    assert re.fullmatch(r"found 2\.[\d.]+; wanted >=99", rows["pydantic"])
    assert [each.partition(":")[0] for each in found["problems"]] == [
        "nothing-of-this-name",
        "pydantic",
        "two words",
    ]
