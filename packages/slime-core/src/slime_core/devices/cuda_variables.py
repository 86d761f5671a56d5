"""Environment variables of processes that use CUDA: the trainer's, and the engine's servers.

They are defaults: a variable that the user has set stays as it is, and `--train-env-vars` stands above both. A process that
uses no CUDA gets none of them. Where slime sets them in its own process (launcher `local`), it notes their names in `MARK`,
so that servers, which are its children, do not take them for the user's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_core.devices.nvidia_smi import finds_nvlink

#: Who gets a variable: ranks of the trainer, or servers of the engine.
Receiver = Literal["trainer", "server"]
#: Lists, by commas, the variables that slime has set in its own process.
MARK = "SLIME_CUDA_DEFAULTS"
#: Files that are there where the driver of a GPU is: of Linux, and of Linux inside of Windows.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


@dataclass(frozen=True)
class CudaVariable:
    """A variable, its values by who gets it, and why; a value None stands for 1 where an NVLink joins GPUs, else 0."""

    name: str
    values: Mapping[Receiver, str | None]
    why: str


#: Source: the reference system's launch scripts and `slime/ray/actor_group.py`; of the last two `slime/ray/rollout.py`.
CUDA_VARIABLES = (
    CudaVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        {"trainer": "1"},
        "kernels start in the order in which they were given, on which Megatron relies to overlap communication with "
        "computation (tensor, sequence and context parallelism); SGLang sets 8 in its servers itself",
    ),
    CudaVariable(
        "NCCL_CUMEM_ENABLE",
        {"trainer": "0"},
        "as SGLang sets it in its servers: both ends of an NCCL group must have the same",
    ),
    CudaVariable(
        "NCCL_NVLS_ENABLE",
        {"trainer": None, "server": None},
        "NVLink SHARP, reductions in the switch: on where an NVLink joins GPUs of the machine, else off",
    ),
    CudaVariable(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        {"trainer": "1"},
        "TransformerEngine's FP8 blocks get float32 scales, as SGLang's have, not powers of 2",
    ),
    CudaVariable(
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
        {"server": "1"},
        "under --colocate the memory of CUDA graphs is given up too",
    ),
    CudaVariable(
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK",
        {"server": "0"},
        "the GPUs of a server may have different amounts of memory free, as the trainer uses them",
    ),
)
#: Their names.
CUDA_VARIABLE_NAMES = tuple(variable.name for variable in CUDA_VARIABLES)


def cuda_defaults(
    receiver: Receiver,
    environment: Mapping[str, str],
    *,
    nvlink: Callable[[], bool] = finds_nvlink,
) -> dict[str, str]:
    """Return the variables to add to a process that uses CUDA: those that its environment does not have.

    Args:
        receiver: what the process is.
        environment: that it would have, with whatever its user has set.
        nvlink: whether an NVLink joins GPUs of its machine; asked only where that matters.
    """
    found = {}
    for variable in CUDA_VARIABLES:
        if receiver in variable.values and variable.name not in environment:
            value = variable.values[receiver]
            found[variable.name] = str(int(nvlink())) if value is None else value
    return found


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of the variables that a user has set in a process whose parts on other machines are to have them, too."""
    own = users_environment(environment)
    return {name: own[name] for name in CUDA_VARIABLE_NAMES if name in own}


def sees_gpu(environment: Mapping[str, str], *, drivers: Iterable[Path] = _DRIVERS) -> bool:
    """Return whether this machine has the driver of a GPU, and the environment does not hide all GPUs. Imports no torch.

    Args:
        environment: of the process.
        drivers: files of which one is there where a driver is.
    """
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(path.exists() for path in drivers)


def set_trainer_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the trainer's variables in an environment whose process is about to train, and note which."""
    added = cuda_defaults("trainer", environment)
    if added:
        noted = [name for name in environment.get(MARK, "").split(",") if name]
        environment.update(added)
        environment[MARK] = ",".join([*noted, *added])


def users_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what `set_trainer_defaults` has set in it."""
    ours = {MARK, *environment.get(MARK, "").split(",")}
    return {name: value for name, value in environment.items() if name not in ours}
