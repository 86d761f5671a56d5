"""`Baselines`: how long problems take in PyTorch, and some numbers of what they answer, kept by problem and by GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slime_core.errors import DataError

from slime_kernels.timing.gpus import KernelDevice

#: Seconds for which times that are not trusted are still taken, for the other answers to the problem: its GPU was disturbed.
_UNTRUSTED_S = 60.0


class Baselines:
    """A folder for each GPU with a JSON file for each problem; in memory alone where no folder is given. Threads may use it.

    A record has `gpu`, `problem`, `versions`, and what is measured. Another version of PyTorch or Triton makes another record.

    Args:
        folder: where records are.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: dict[tuple[str, str], dict[str, Any]] = {}
        self._untrusted: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
        self._locks: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)

    def get(self, gpu: KernelDevice, code: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the record of a problem's source on a GPU; what `make` returns where there is none, kept if all times in it are trusted, or else for a minute.

        Raises:
            DataError: a file of it is damaged; names it.
        """
        versions = {name: version(name) for name in ("torch", "triton")}
        digest = hashlib.sha256(json.dumps([code, versions]).encode()).hexdigest()
        key = (gpu.name, digest)
        with self._locks[key]:  # one measurement of a problem at a time, on each GPU
            if key not in self._kept and (read := self._read(gpu, digest)) is not None:
                self._kept[key] = read
            if key in self._kept:
                return self._kept[key]
            until, record = self._untrusted.get(key, (0.0, {}))
            if time.monotonic() < until:
                return record
            record = {"gpu": gpu.name, "problem": digest, "versions": versions, **make()}
            if _is_trusted(record):
                self._kept[key] = record
                self._write(gpu, digest, record)
            else:
                self._untrusted[key] = (time.monotonic() + _UNTRUSTED_S, record)
            return record

    def path(self, gpu: KernelDevice, digest: str) -> Path | None:
        """Return the file of a problem, by the SHA-256 of its source and the versions of what it was timed with."""
        name = re.sub(r"\W+", "-", gpu.name)
        return None if self._folder is None else self._folder / name / f"{digest[:32]}.json"

    def _read(self, gpu: KernelDevice, digest: str) -> dict[str, Any] | None:
        path = self.path(gpu, digest)
        if path is None or not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
            if (found["gpu"], found["problem"]) == (gpu.name, digest) and found["eager"]["median_us"] > 0:
                return dict(found) if _is_trusted(found) else None
            why = "of another problem or GPU"
        except (ValueError, KeyError, TypeError) as error:
            why = repr(error)
        raise DataError(f"{path}: found no times of a problem ({why}); delete it, and it is measured again")

    def _write(self, gpu: KernelDevice, digest: str, record: dict[str, Any]) -> None:
        path = self.path(gpu, digest)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(record, indent=1))
        part.replace(path)


def _is_trusted(record: Mapping[str, Any]) -> bool:
    """Return whether all times of a record are; that torch.compile fails is known, too."""
    measured = [one for one in record.values() if isinstance(one, dict) and "median_us" in one]
    return all(one.get("trusted", False) for one in measured)
