"""Command line and environment of an SGLang server."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slime_core.devices.cuda_variables import cuda_defaults, handed_on, users_environment

from slime_sglang.inside.device import PLATFORM_NAME
from slime_sglang.settings.section import pipeline_stages

Device = Literal["cuda", "cpu"]

#: Environment variable with the seconds after which a server gives up a health check; SGLang reads a whole number.
HEALTH_TIMEOUT = "SGLANG_HEALTH_CHECK_TIMEOUT"

#: Arguments of servers that the run starts; the user's win. An event of a stream brings 32 new tokens, so that at most as
#: many are lost with an engine. Shared experts keep their names and are not reported as routed ones: on CUDA, SGLang would
#: fuse them with the routed experts.
OWN_ARGUMENTS = {
    "enable_metrics": True,
    "incremental_streaming_output": True,
    "stream_interval": 32,
    "disable_shared_experts_fusion": True,
}


def server_command(
    model_path: str | Path,
    *,
    port: int,
    dtype: str,
    host: str = "127.0.0.1",
    device: Device | None = None,
    max_total_tokens: int | None = None,
    max_running_requests: int | None = None,
    arguments: Sequence[str] = (),
) -> list[str]:
    """Return the command line of a server, to be run with `server_environment` of the same device.

    Args:
        model_path: Hugging Face folder.
        port: TCP port of its HTTP interface.
        dtype: of the weights: `float32`, `bfloat16`, `float16` or `auto`.
        host: address that it listens on.
        device: what it runs on; None for CUDA where this process sees a GPU, otherwise the CPU.
        max_total_tokens: capacity of the KV cache. None leaves it to SGLang on CUDA; on a CPU, where SGLang would
            take most of the machine's memory, it is 32,768.
        max_running_requests: requests in one batch; None is SGLang's choice on CUDA, and 64 on a CPU.
        arguments: more of SGLang's arguments, as words; they win.
    """
    command = [sys.executable, "-m", "slime_sglang.server.launch"]
    command += ["--model-path", str(model_path), "--host", host, "--port", str(port), "--dtype", dtype]
    if (device or visible_device()) == "cpu":
        max_total_tokens = max_total_tokens or 32768
        max_running_requests = max_running_requests or 64
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        # Without --sleep-on-idle an idle scheduler keeps a core busy, of which there are few, and the trainer wants them.
        command += ["--disable-cuda-graph", "--skip-server-warmup", "--sleep-on-idle"]
    if max_total_tokens is not None:
        command += ["--max-total-tokens", str(max_total_tokens)]
    if max_running_requests is not None:
        command += ["--max-running-requests", str(max_running_requests)]
    return [*command, *arguments]


def server_environment(
    *,
    device: Device | None = None,
    n_ranks: int = 1,
    n_ranks_in_all: int | None = None,
    is_placed: bool = False,
) -> dict[str, str]:
    """Return the variables to add to the environment of a server of `n_ranks` ranks.

    On CUDA they are those of `slime_core.devices.cuda_variables` that the user has not set; where the server is at a place of the
    launcher's (`is_placed`), whose machine knows them, those that the user has set here. On a CPU they hide the GPUs, which SGLang
    would otherwise take, choose our platform, and share the cores out among the `n_ranks_in_all` ranks of all servers on this host:
    OpenMP threads that wait for others keep their core busy. Ranks there share one memory: that each finds as much of it free, at
    moments of its own, is not asked for.
    """
    if (device or visible_device()) == "cuda":
        if is_placed:
            return handed_on(os.environ)
        return cuda_defaults("server", users_environment(os.environ))
    chosen = {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
    if n_ranks > 1:
        chosen["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    cores = sorted(os.sched_getaffinity(0))
    if (
        n_ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ
    ):  # without, it wants a NUMA node for each rank
        shares = [cores[rank % len(cores) :: n_ranks] for rank in range(n_ranks)]
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    n_sharing = max(n_ranks, n_ranks_in_all or 1)
    if n_sharing == 1 or "OMP_NUM_THREADS" in os.environ:
        return chosen
    return chosen | {"OMP_NUM_THREADS": str(max(1, len(cores) // n_sharing))}


def health_environment(timeout_s: float) -> dict[str, str]:
    """Return the variable by which a server heeds the run's deadline of a health check, seconds; what the user has set here wins.

    By itself SGLang 0.5.23 gives up after 20 s, and answers that it is not healthy (`health_generate` of entrypoints/http_server.py).
    """
    return {HEALTH_TIMEOUT: os.environ.get(HEALTH_TIMEOUT, str(math.ceil(timeout_s)))}


def server_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return SGLang's arguments as words of a command line: `{"mem_fraction_static": 0.8}`, for example.

    True stands for a flag without a value, False and None for a flag that is not given; a list becomes several words,
    and a table its JSON.
    """
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words


def gpu_arguments(
    values: Mapping[str, Any], *, first: int = 0, count: int = 1, device: Device | None = None
) -> dict[str, Any]:
    """Return the arguments that give a server its GPUs: `count` of them, from `first` after the base that `values` give.

    On a CPU it gets `count` ranks.
    """
    ranks = rank_arguments(values, count)
    if (device or visible_device()) == "cpu":
        return ranks
    return ranks | {"base_gpu_id": int(values.get("base_gpu_id") or 0) + first}


def rank_arguments(values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the arguments that give a server `count` ranks: those that share matrices, in each pipeline stage that `values` give."""
    sharing = count // pipeline_stages(values)
    return {"tp_size": sharing} if sharing > 1 else {}


def visible_device() -> Device:
    """Return "cuda" where this process sees a GPU, otherwise "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
