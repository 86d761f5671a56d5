"""What this machine has: Python, cores, memory, disk, GPUs. Imports no heavy package."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

#: Where containers find the limit of their memory, in bytes or `max`: control groups of version 2 and 1.
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def machine(folder: Path) -> dict[str, str]:
    """Return what there is by name, as text; of disks that of `folder`."""
    disk = shutil.disk_usage(folder)
    return {
        "python": f"{sys.version.split()[0]}, {sys.executable}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": _cores(),
        "memory": _memory(),
        "disk": f"{_gb(disk.free)} free of {_gb(disk.total)} at {folder}",
        "gpu": "; ".join(gpus()) or "no GPU",
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


def _memory() -> str:
    """Return how much memory there is and how much is available, and the container's limit where that is less."""
    lines = dict(line.partition(":")[::2] for line in _read(Path("/proc/meminfo")).splitlines())
    total, available = (_kib(lines.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    if total is None or available is None:
        return "unknown: no /proc/meminfo"
    text = f"{_gb(available)} available of {_gb(total)}"
    limits = [int(value) for value in map(_read, _MEMORY_LIMITS) if value.isdigit()]
    return text + (f"; the container's limit is {_gb(limits[0])}" if limits and limits[0] < total else "")


def gpus() -> list[str]:
    """Return name, memory and driver of each GPU that the driver's own tool knows; none where it is not there."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.free,driver_version",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"unknown: nvidia-smi: {error}"]
    if done.returncode != 0:
        return [f"unknown: nvidia-smi: {(done.stdout + done.stderr).strip() or f'status {done.returncode}'}"]
    found = []
    for line in done.stdout.splitlines():
        name, total, free, driver = (part.strip() for part in line.split(","))
        found.append(f"{name}, {free} free of {total}, driver {driver}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _kib(text: str) -> int | None:
    """Return the bytes of `1234 kB`."""
    number = text.strip().partition(" ")[0]
    return int(number) * 1024 if number.isdigit() else None


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB"
