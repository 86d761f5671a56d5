"""`PrometheusTargets`: the file that tells Prometheus the endpoint of a server."""

from __future__ import annotations

import json
from pathlib import Path

from slime_core.rundir.rundir import write_atomic


class PrometheusTargets:
    """One file for `file_sd_configs` of Prometheus, there while the server is.

    Args:
        folder: of the file.
        name: of the server, which labels its metrics.
        address: `host:port`, with `/metrics` behind it.
    """

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self._path = folder / f"{name}.targets.json"
        self._groups = [{"targets": [address], "labels": {"engine": name}}]

    def write(self) -> None:
        """Write it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps(self._groups) + "\n")

    def remove(self) -> None:
        """Delete it; it may be gone."""
        self._path.unlink(missing_ok=True)
