"""`KernelDevice`: the devices that candidates are launched on, asked for in a process of its own, and who may use one meanwhile.

The process that asks here never calls CUDA: a process that has done so cannot be forked from any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_core.devices.cuda_variables import sees_gpu
from slime_core.errors import ConfigError, Problem

_PROBE_S = 120.0
_NODES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm*", "/dev/nvidia-caps/*")


@dataclass(frozen=True, kw_only=True)
class KernelDevice:
    """A device that candidates are launched on."""

    name: str
    """As its driver tells it: `NVIDIA H100 80GB HBM3`."""
    bytes_per_us: float
    """What its memory moves at most in a microsecond: twice its clock, on all lines of its bus."""
    cache_bytes: int
    """Its second-level cache."""
    visible: str = ""
    """CUDA_VISIBLE_DEVICES of a process that is to see it alone."""
    order: str = ""
    """CUDA_DEVICE_ORDER under which that names it; CUDA's own order where it is empty."""
    capability: str = ""
    """Such as `sm_90`."""
    library: str = ""
    """Folder of the driver's library, libcuda.so.1."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """`cpu`: this machine's CPU stands in for a device, its kernels interpreted, where tests show that all of it works."""

    @property
    def nodes(self) -> list[str]:
        """The files by which a process reaches it."""
        return sorted(path for form in _NODES for path in glob.glob(form)) if self.kind == "cuda" else []

    @contextlib.contextmanager
    def used(self, *, alone: bool) -> Iterator[None]:
        """Use it in this block, beside others or alone, on the whole machine: who times waits for all others, and they for it.

        Who waits to be alone lets nobody in before it.
        """
        folder = Path(tempfile.gettempdir(), f"slime-gpu-locks-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        name = re.sub(r"\W+", "-", f"{self.name} {self.visible}")
        with (folder / f"{name}.turn").open("w") as turn, (folder / f"{name}.use").open("w") as use:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(use, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
            yield


class Devices:
    """Devices in turn. Threads may ask side by side.

    Args:
        gpus: one or more.
    """

    def __init__(self, gpus: Sequence[KernelDevice]) -> None:
        self.gpus = tuple(gpus)
        self._turn = itertools.cycle(self.gpus)

    def take(self) -> KernelDevice:
        """Return the next one."""
        return next(self._turn)


def devices_for(device: Literal["auto", "cpu", "cuda"]) -> Devices | None:
    """Return the GPUs that `kernels.device` wants; None where candidates are to be interpreted and their time estimated.

    Raises:
        ConfigError: `cuda` where there is none, or it cannot be used; says what is missing.
    """
    if device == "cpu":
        return None
    found = find_gpus()
    if not isinstance(found, str):
        return Devices(found)
    if device == "auto":
        return None
    todo = "choose 'auto' or 'cpu', where an interpreter tries kernels and a cost model tells their time"
    raise ConfigError([Problem("kernels.device", f"'cuda', and {found}", "a GPU that CUDA can use", todo)])


def find_gpus() -> list[KernelDevice] | str:
    """Return the GPUs that this process may use, or why there are none."""
    if not sees_gpu(os.environ):
        return "no driver of a GPU, or CUDA_VISIBLE_DEVICES that hides all"
    program = "from slime_kernels.timing.gpus import _ask; _ask()"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a driver that does not answer ({error})"
    if asked.returncode:
        return (asked.stderr.strip().splitlines() or ["a driver that says nothing"])[-1]
    return [KernelDevice(**one) for one in json.loads(asked.stdout)]


def _ask() -> None:
    """Print the GPUs that CUDA's driver shows this process, as JSON; exit with a sentence where there is none."""
    import ctypes

    import torch

    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__}, which is built without CUDA")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        sys.exit(f"no library of the driver ({error})")
    count, number = ctypes.c_int(), ctypes.c_int()
    if (code := driver.cuInit(0)) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        sys.exit(f"no GPU that the driver shows (error {code} of cuInit)")

    def attribute(which: int, device: int) -> int:
        if driver.cuDeviceGetAttribute(ctypes.byref(number), which, device):
            sys.exit(f"a GPU whose driver does not tell its attribute {which}")
        return number.value

    maps = Path("/proc/self/maps").read_text()
    library = next(line.split()[-1] for line in maps.splitlines() if "libcuda.so" in line)
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    found = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        clock_khz, bus_bits = attribute(36, device.value), attribute(37, device.value)
        if not clock_khz or not bus_bits:
            sys.exit(f"{name.value.decode()}, whose driver does not tell the bandwidth of its memory")
        found.append(
            {
                "name": name.value.decode(),
                "bytes_per_us": 2 * clock_khz * bus_bits / 8 / 1e3,
                "cache_bytes": attribute(38, device.value),
                "capability": f"sm_{attribute(75, device.value)}{attribute(76, device.value)}",
                "visible": visible[index].strip() if visible else str(index),
                "order": os.environ.get("CUDA_DEVICE_ORDER", ""),
                "library": str(Path(library).parent),
            }
        )
    print(json.dumps(found))
