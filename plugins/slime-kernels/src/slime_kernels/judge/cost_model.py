"""The cost model: a deterministic estimate of a GPU's time, for machines without one. Named as such in every record.

Each launch takes what the slowest of four takes: its bytes from memory, its bytes through the cache, its arithmetic, and its
matrix products; occupancy, which registers and shared memory bound, slows all of them down where it is low, and so does a grid
too small for the device. Source: the roofline model (Williams et al., 2009), with the public data sheets of the devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The name under which records have what this estimates.
SOURCE = "cost-model"


@dataclass(frozen=True, kw_only=True)
class CostDevice:
    """What a GPU can do."""

    memory_bytes_per_us: float
    cache_bytes_per_us: float
    flops_per_us: float
    products_per_us: float
    """Operations of matrix products, with 32-bit inputs in TF32."""
    launch_us: float
    multiprocessors: int
    registers: int = 65536
    shared_bytes: int = 167_936
    warps: int = 64
    lanes: int = 32
    """Threads of a warp."""


DEVICES: Mapping[str, CostDevice] = {
    "sm_80": CostDevice(
        memory_bytes_per_us=1.555e6,
        cache_bytes_per_us=5e6,
        flops_per_us=1.95e7,
        products_per_us=1.56e8,
        launch_us=3.0,
        multiprocessors=108,
    ),
    "sm_90": CostDevice(
        memory_bytes_per_us=3.35e6,
        cache_bytes_per_us=8e6,
        flops_per_us=6.7e7,
        products_per_us=4.94e8,
        launch_us=2.5,
        multiprocessors=132,
        shared_bytes=233_472,
    ),
    "gfx942": CostDevice(
        memory_bytes_per_us=5.3e6,
        cache_bytes_per_us=1.2e7,
        flops_per_us=8.17e7,
        products_per_us=6.5e8,
        launch_us=4.0,
        multiprocessors=304,
        registers=131_072,
        shared_bytes=65_536,
        warps=32,
        lanes=64,
    ),
}
#: Warps of a multiprocessor that hide its memory's latency; fewer leave bandwidth unused.
_ENOUGH_WARPS = 16
#: What PyTorch's own matrix products reach of the peak, and the host's time between two of its operations.
_PRODUCT_SHARE, _EAGER_US = 0.7, 2.0


def kernels_of(
    launches: Sequence[Mapping[str, Any]], compiled: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any] | None]:
    """Return the compiled kernel of each launch: by order, as specialisations of a kernel share its name; by name where their numbers differ.

    Args:
        launches: as `Interpreted` takes them down.
        compiled: of each launch that was compiled, its kernel, with `name`.
    """
    if len(launches) == len(compiled):
        return list(compiled)
    by_name = {kernel["name"]: kernel for kernel in compiled}
    return [by_name.get(launch["name"]) for launch in launches]


def candidate_us(
    launches: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any] | None], target: str
) -> tuple[float, list[dict[str, Any]]]:
    """Return the time of a candidate's launches, microseconds, and of each launch what it consists of.

    Args:
        launches: as `Interpreted` takes them down, of some of their programs.
        kernels: of each, its warps, and by target registers, shared and spilled bytes; None where it is not known.
        target: the device.
    """
    parts = [_launch(one, kernel, target) for one, kernel in zip(launches, kernels, strict=True)]
    return float(sum(part["us"] for part in parts)), parts


def _launch(launch: Mapping[str, Any], kernel: Mapping[str, Any] | None, target: str) -> dict[str, Any]:
    device = DEVICES[target]
    scale = launch["programs"] / max(1, launch["run"])
    cache = (launch["loaded"] + launch["stored"]) * scale
    memory = sum(min(size, moved * scale) for size, moved in launch["touched"])
    share, spilled = 1.0, 0.0
    if kernel is not None:
        about = kernel["targets"][target]
        threads = device.lanes * kernel["warps"]
        blocks = min(
            device.registers // max(1, about["registers"] * threads),
            device.shared_bytes // max(1, about["shared_bytes"]),
            device.warps // kernel["warps"],
        )
        resident = max(1, blocks) * kernel["warps"]
        share = min(1.0, resident / _ENOUGH_WARPS)
        spilled = 2.0 * about["spilled_bytes"] * threads * launch["programs"]
    busy = min(1.0, launch["programs"] / device.multiprocessors) * share
    times = {
        "memory": memory / device.memory_bytes_per_us,
        "cache": (cache + spilled) / device.cache_bytes_per_us,
        "arithmetic": launch["flops"] * scale / device.flops_per_us,
        "products": launch["products"] * scale / (_PRODUCT_SHARE * device.products_per_us),
    }
    return {
        "name": launch["name"],
        "us": device.launch_us + max(times.values()) / max(busy, 1e-3),
        "busy": busy,
        **times,
    }


def eager_us(operations: Sequence[Mapping[str, Any]], target: str) -> float:
    """Return the time of PyTorch's operations, one launch each, microseconds."""
    device = DEVICES[target]
    total = 0.0
    for one in operations:
        rate = _PRODUCT_SHARE * device.products_per_us if one["products"] else device.flops_per_us
        slowest = max(one["bytes"] / device.memory_bytes_per_us, one["flops"] / rate)
        total += device.launch_us + _EAGER_US + slowest
    return total


def least_us(least_bytes: int, target: str) -> float:
    """Return the time that nothing goes below: the inputs read once, the answer written once, one launch."""
    device = DEVICES[target]
    return device.launch_us + least_bytes / device.memory_bytes_per_us
