"""Command line and environment of a server, on CUDA and on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slime_core.devices.cuda_variables import CUDA_VARIABLE_NAMES, MARK
from slime_core.protocols import Site
from slime_sglang.server.command import (
    HEALTH_TIMEOUT,
    Device,
    gpu_arguments,
    server_command,
    server_environment,
)
from slime_sglang.server.managed import command_line
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings


def test_command_on_cuda_leaves_the_choices_to_sglang() -> None:
    command = server_command("m", port=8000, dtype="bfloat16", device="cuda")
    assert " ".join(command[1:]) == (
        "-m slime_sglang.server.launch --model-path m --host 127.0.0.1 --port 8000 --dtype bfloat16"
    )


#: SGLang's check that the memories of a server's ranks have as much left.
UNBALANCED = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
#: What a server on CUDA gets of slime, where there is no nvidia-smi to tell of an NVLink.
ON_CUDA = {
    "NCCL_NVLS_ENABLE": "0",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
    UNBALANCED: "0",
}
#: Starts a child as servers are started, after the trainer's variables were set in its parent; the child prints its environment.
OWNER = """
import asyncio, sys
from pathlib import Path
from slime_core.devices.cuda_variables import set_trainer_defaults
from slime_core.runtime.processes.server_process import ServerProcess
from slime_sglang.server.command import server_environment

async def main():
    set_trainer_defaults()
    server = ServerProcess(
        [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"],
        environment=server_environment(device=sys.argv[2]),
        log=Path(sys.argv[1]),
    )
    await server.start()
    assert await server.wait() == 0
    await server.stop()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("device", "own", "expected"),
    [
        ("cuda", {}, ON_CUDA),
        ("cuda", {"NCCL_NVLS_ENABLE": "2", "NCCL_CUMEM_ENABLE": "1"}, ON_CUDA | {"NCCL_NVLS_ENABLE": "2", "NCCL_CUMEM_ENABLE": "1"}),
        ("cpu", {}, {}),
    ],
)  # fmt: skip
def test_environment_of_a_servers_process(
    tmp_path: Path, device: str, own: dict[str, str], expected: dict[str, str]
) -> None:
    """What the trainer in the parent got of slime does not reach it; what the user has set does."""
    theirs = {name: value for name, value in os.environ.items() if name not in CUDA_VARIABLE_NAMES}
    log = tmp_path / "log"
    environment = theirs | {"PATH": str(tmp_path)} | own
    subprocess.run([sys.executable, "-c", OWNER, str(log), device], env=environment, check=True)
    found = json.loads(log.read_text())
    assert {name: found[name] for name in CUDA_VARIABLE_NAMES if name in found} == expected
    assert MARK not in found


def test_command_on_a_cpu_bounds_the_cache_and_takes_pytorch() -> None:
    command = server_command(
        "m", port=8000, dtype="float32", device="cpu", arguments=["--max-total-tokens", "9"]
    )
    assert " ".join(command).endswith(
        "--device cpu --attention-backend torch_native --disable-cuda-graph --skip-server-warmup --sleep-on-idle "
        "--max-total-tokens 32768 --max-running-requests 64 --max-total-tokens 9"
    )
    assert server_environment(device="cpu") == {"SGLANG_PLATFORM": "cpu_torch", "CUDA_VISIBLE_DEVICES": ""}


def test_servers_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for n_servers, threads in ((2, max(1, cores // 2)), (cores + 1, 1), (3 * cores, 1)):
        environment = server_environment(device="cpu", n_ranks_in_all=n_servers)
        assert environment["OMP_NUM_THREADS"] == str(threads)
    assert "OMP_NUM_THREADS" not in server_environment(device="cpu")
    assert "OMP_NUM_THREADS" not in server_environment(device="cuda", n_ranks_in_all=2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in server_environment(device="cpu", n_ranks_in_all=2)


def test_ranks_of_a_server_on_a_cpu_get_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5, 6})
    bind = "SGLANG_CPU_OMP_THREADS_BIND"
    assert server_environment(device="cpu", n_ranks=2)[bind] == "2,4,6|3,5"
    assert server_environment(device="cpu", n_ranks=6)[bind] == "2|3|4|5|6|2"  # more than there are
    assert bind not in server_environment(device="cpu", n_ranks_in_all=2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_may_find_more_or_less_memory_free(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """On a CPU they look at one memory at moments of their own, and others take and give some of it meanwhile."""
    from sglang.srt.distributed.bootstrap import _check_tp_memory_balance

    unlike = {"pre_model_load_memory": 10.1, "local_gpu_memory": 14.5}
    monkeypatch.delenv(UNBALANCED, raising=False)
    with pytest.raises(RuntimeError, match="unbalanced"):
        _check_tp_memory_balance(**unlike)
    monkeypatch.setenv(UNBALANCED, server_environment(device=device, n_ranks=2)[UNBALANCED])
    _check_tp_memory_balance(**unlike)


def test_servers_on_cuda_get_one_gpu_after_the_other() -> None:
    assert gpu_arguments({}, first=2, device="cuda") == {"base_gpu_id": 2}
    assert gpu_arguments({"base_gpu_id": "4"}, first=2, device="cuda") == {"base_gpu_id": 6}
    assert gpu_arguments({"base_gpu_id": "4"}, first=2, count=2, device="cuda") == {
        "base_gpu_id": 6,
        "tp_size": 2,
    }
    assert gpu_arguments({"base_gpu_id": "4"}, first=2, count=2, device="cpu") == {"tp_size": 2}


def test_the_ranks_of_a_pipeline_stage_share_matrices() -> None:
    assert gpu_arguments({"pp_size": "2"}, count=4, device="cpu") == {"tp_size": 2}
    assert gpu_arguments({"pipeline_parallel_size": 4}, count=4, device="cpu") == {}


def test_a_server_gives_a_health_check_up_no_sooner_than_the_run_unless_the_user_says_when(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ServerSettings(
        model_path=Path("m"), dtype="float32", section=SglangSection(), folder=tmp_path, health_timeout_s=30.5
    )

    def told(settings: ServerSettings, device: Device) -> str | None:
        site = Site("127.0.0.1", (1, 2, 3))
        return command_line(settings, site, key="k", device=device)[1].get(HEALTH_TIMEOUT)

    monkeypatch.delenv(HEALTH_TIMEOUT, raising=False)
    assert told(settings, "cpu") == told(settings, "cuda") == "31"
    assert told(replace(settings, health_timeout_s=None), "cpu") is None  # nobody checks it
    monkeypatch.setenv(HEALTH_TIMEOUT, "7")
    assert told(settings, "cpu") == told(settings, "cuda") == "7"


def test_sglang_reads_its_deadline_of_a_health_check_from_that_variable() -> None:
    package = importlib.util.find_spec("sglang").submodule_search_locations[0]
    server = (Path(package) / "srt/entrypoints/http_server.py").read_text()
    assert f'HEALTH_CHECK_TIMEOUT = int(os.getenv("{HEALTH_TIMEOUT}", 20))' in server
