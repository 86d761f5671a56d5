"""`OfflineDriver`: lets Triton compile launches for a GPU that is not there; it takes them down and runs nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

#: Target -> (Triton's name of it, bytes of shared memory of a block, registers of a block's thread at most).
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
}
_MULTIPROCESSORS = 108


class _Utils:
    def __init__(self, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._shared_bytes,
            "multiprocessor_count": _MULTIPROCESSORS,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


class OfflineDriver(DriverBase):  # type: ignore[misc]  # triton has no types
    """A driver of Triton for a target without a device."""

    def __init__(self, target: str) -> None:
        self._target, shared_bytes = TARGETS[target]
        self.name, self.utils = target, _Utils(shared_bytes)
        self.launches: list[dict[str, Any]] = []
        self.sources: list[tuple[Any, Any]] = []
        """(source, metadata) of each kernel that was compiled."""
        self.timing = False
        """Autotuning tries a configuration; its launches are not the candidate's."""

    @classmethod
    def is_active(cls) -> bool:
        """Return whether it is chosen without being asked for: never."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the type, for a launcher that is never built."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return the target."""
        return self._target

    def get_active_torch_device(self) -> torch.device:
        """Return the CPU, where all tensors are."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Return the one device that there is."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Accept a device."""

    def get_current_stream(self, device: int) -> int:
        """Return the one stream that there is."""
        return 0

    def get_device_interface(self) -> Any:
        """Return torch's functions of the CPU."""
        return torch.cpu

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return what autotuning times launches with: each is launched once, and all take as long."""

        def bench(call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **_: Any) -> list[float]:
            self.timing = True
            try:
                call()
            finally:
                self.timing = False
            return [1.0] * len(quantiles)

        return bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return a tensor to clear between timings."""
        return torch.empty(1, dtype=torch.int32)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Clear nothing."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what stands in the place of a launch."""
        number = len(self.sources)
        self.sources.append((source, metadata))

        def launch(x: int, y: int, z: int, *_: Any) -> None:
            if not self.timing:
                self.launches.append({"kernel": number, "grid": [int(x), int(y), int(z)]})

        return launch


def resources(kernel: Any, target: str, folder: Path) -> dict[str, int]:
    """Return registers of a thread, and shared memory and spilled bytes, from a compiled kernel's binary."""
    shared = int(kernel.metadata.shared)
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        return {
            "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
            "spilled_bytes": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text),
            "shared_bytes": shared,
        }
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    ran = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True, timeout=30
    )
    return {
        "registers": _number(r"REG:(\d+)", ran.stdout),
        "spilled_bytes": _number(r"LOCAL:(\d+)", ran.stdout) + _number(r"STACK:(\d+)", ran.stdout),
        "shared_bytes": shared,
    }


def _number(pattern: str, text: str) -> int:
    """Return the number that a tool tells.

    Raises:
        ValueError: it tells none.
    """
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in what the tool for binaries tells")
    return int(found[1])
