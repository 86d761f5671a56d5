"""What this machine has: Python, cores, memory, disk, shared memory, ports, GPUs. Imports no heavy package."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from importlib_metadata import PackageNotFoundError, version

from slime_core.devices.nvidia_smi import describe_links, nvidia_smi, read_links
from slime_core.protocols.memory import Device
from slime_core.runtime.processes.ports import port_is_free

#: Where containers find the limit of their memory, in bytes or `max`: control groups of version 2 and 1.
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
#: Where updates of weights are staged for SGLang servers, and Ray keeps its objects.
SHARED_MEMORY = Path("/dev/shm")
#: Ports that a Ray cluster listens on unless it is told others, by what they are for.
_RAY_PORTS = {6379: "head of a Ray cluster", 8265: "its dashboard"}
#: This machine's own address as PyTorch writes it when it asks for its name, which no file of hosts has.
_OWN_ADDRESS = ("::ffff:127.0.0.1", 0, 0, 0)
#: Seconds of a lookup that are worth a remark.
_SLOW_LOOKUP_S = 0.5
#: From which the kernel takes ports where a program does not say which: servers, router and ranks.
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def machine(folder: Path) -> dict[str, str]:
    """Return what there is by name, as text; of disks that of `folder`."""
    disk = shutil.disk_usage(folder)
    return {
        "python": f"{sys.version.split()[0]}, {sys.executable}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": _cores(),
        "memory": _memory(),
        "disk": f"{_gb(disk.free)} free of {_gb(disk.total)} at {folder}",
        "shared memory": shared_memory(),
        "ports": ports(),
        "names": name_lookup(),
        "gpu": "; ".join(gpus()) or "no GPU",
        "links of GPUs": _links(),
    }


def _cores() -> str:
    """Return how many cores this process may use, and how many there are where that is more."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    text = f"{usable}" if usable == total else f"{usable} of {total} (by the process's affinity)"
    quota, _, period = _read(_CPU_LIMIT).partition(" ")
    if quota.isdigit() and period.isdigit() and int(quota) / int(period) < usable:
        text += f", time of {int(quota) / int(period):g} (by the container's limit)"
    return text


def memory_bytes() -> int | None:
    """Return the memory of this machine, or the container's limit where that is less; None where neither is known."""
    total, _ = _total_and_available()
    return min(filter(None, (total, _limit())), default=None)


def device() -> Device:
    """Return what a run on this machine computes on: its GPUs, of which the largest counts, or its CPU.

    PyTorch is not imported for it. That its build for CPUs sees no GPU is known from its version.
    """
    found = gpus()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not found or hidden or "+cpu" in _version("torch"):
        return Device(kind="cpu", memory_bytes=memory_bytes())
    sizes = re.findall(r" of (\d+) MiB", "; ".join(found))
    return Device(kind="cuda", memory_bytes=max((int(size) * 2**20 for size in sizes), default=None))


def _memory() -> str:
    """Return how much memory there is and how much is available, and the container's limit where that is less."""
    total, available = _total_and_available()
    if total is None or available is None:
        return "unknown: no /proc/meminfo"
    limit, text = _limit(), f"{_gb(available)} available of {_gb(total)}"
    return text + (f"; the container's limit is {_gb(limit)}" if limit is not None and limit < total else "")


def _total_and_available() -> tuple[int | None, int | None]:
    lines = dict(line.partition(":")[::2] for line in _read(Path("/proc/meminfo")).splitlines())
    return _kib(lines.get("MemTotal", "")), _kib(lines.get("MemAvailable", ""))


def _limit() -> int | None:
    limits = [int(value) for value in map(_read, _MEMORY_LIMITS) if value.isdigit()]
    return limits[0] if limits else None


def gpus() -> list[str]:
    """Return name, memory and driver of each GPU that the driver's own tool knows; none where it is not there."""
    wanted = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        told = nvidia_smi(wanted, "--format=csv,noheader")
    except OSError as error:
        return [f"unknown: nvidia-smi: {error}"]
    found = []
    for line in told.splitlines():
        name, total, free, driver = (part.strip() for part in line.split(","))
        found.append(f"{name}, {free} free of {total}, driver {driver}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _kib(text: str) -> int | None:
    """Return the bytes of `1234 kB`."""
    number = text.strip().partition(" ")[0]
    return int(number) * 1024 if number.isdigit() else None


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB"


def _links() -> str:
    """Return what joins the GPUs: NVLinks (`NV` and how many), or a way over PCIe by the tool's own names."""
    try:
        links = read_links(nvidia_smi("topo", "-m"))
    except OSError as error:
        return f"unknown: nvidia-smi: {error}"
    return describe_links(links) if links else "none"


def shared_memory(folder: Path = SHARED_MEMORY) -> str:
    """Return how much room a folder in shared memory has."""
    try:
        found = shutil.disk_usage(folder)
    except OSError as error:
        return f"none: {folder}: {error.strerror}"
    return f"{_gb(found.free)} free of {_gb(found.total)} at {folder}"


def ports(listened_on: Mapping[int, str] = _RAY_PORTS, kernels: Path = _PORT_RANGE) -> str:
    """Return the range from which servers and ranks get ports, and whether those of a Ray cluster are free."""
    first, last = (_read(kernels).split() or ["?", "?"])[:2]
    each = [
        f"{port} ({what}) {'free' if port_is_free(port, host='') else 'taken'}"
        for port, what in listened_on.items()
    ]
    return "; ".join([f"{first} to {last} for servers and ranks", *each])


def name_lookup(ask: Callable[[], object] = lambda: socket.getnameinfo(_OWN_ADDRESS, 0)) -> str:
    """Return how long it takes to be told the name of an address, for which PyTorch asks at each connection between ranks."""
    begin = time.perf_counter()
    try:
        ask()
    except OSError as error:
        return f"an address's name is not to be had: {error}"
    seconds = time.perf_counter() - begin
    text = f"{seconds:.3f} s to look up an address's name"
    if seconds < _SLOW_LOOKUP_S:
        return text
    return f"{text}: ranks wait so long for each connection; see that the name server of /etc/resolv.conf answers"
