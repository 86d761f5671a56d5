"""Servers that somebody else started: what is asked of them before they are joined."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import EngineError

from slime_sglang import loader


class ExternalServer:
    """Stands where a `ServerProcess` does for a server that is neither started nor stopped here.

    Args:
        address: `host:port`.
    """

    log = None

    def __init__(self, address: str) -> None:
        self.name = f"the SGLang server at {address}"
        self._left = asyncio.Event()

    async def start(self) -> None:
        """Nothing to do: it runs already."""

    async def wait(self) -> None:
        """Wait until it is left."""
        await self._left.wait()

    async def stop(self) -> None:
        """Leave it: every call under way fails."""
        self._left.set()

    async def kill(self) -> None:
        """Leave it: every call under way fails."""
        self._left.set()

    @property
    def failure(self) -> str | None:
        """That it was left; None before."""
        return f"{self.name} is not used any more" if self._left.is_set() else None


def check_joined(
    info: Mapping[str, Any], address: str, *, model_path: Path, dtype: str, routes: bool = False
) -> None:
    """Check that a server is one that this run can use.

    Args:
        info: what it answers to `/server_info`.
        address: `host:port`.
        model_path: Hugging Face folder of the run's model.
        dtype: that the run wants, as torch spells it.
        routes: whether it must say which experts each token passed.

    Raises:
        EngineError: another model or dtype, no routes where they are needed, or no loader that proves weights.
    """
    where = f"the SGLang server at {address}"
    served = str(info.get("model_path"))
    if not _same_model(Path(served), model_path):
        raise EngineError(f"{where}: found the model {served}; wanted {model_path}")
    if info.get("dtype") not in (dtype, "auto"):
        raise EngineError(
            f"{where}: found dtype {info.get('dtype')}; wanted {dtype}; start it with --dtype {dtype}, or give "
            "--sglang-dtype"
        )
    if routes and not info.get("enable_return_routed_experts"):
        raise EngineError(
            f"{where}: it does not say which experts each token passed, which this run needs; start it with "
            "--enable-return-routed-experts"
        )
    wanted = set(loader.LOADERS)
    if not wanted <= set(info.get("custom_weight_loader") or ()):
        raise EngineError(
            f"{where}: found no loader that checks and proves weights; start it with "
            f"--custom-weight-loader {' '.join(loader.LOADERS)}, slime-sglang installed beside it"
        )


def _same_model(served: Path, ours: Path) -> bool:
    """Return whether two folders hold a model of the same configuration."""
    if served.resolve() == ours.resolve():
        return True
    theirs, own = served / "config.json", ours / "config.json"
    return theirs.is_file() and theirs.read_bytes() == own.read_bytes()
