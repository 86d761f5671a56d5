"""External servers, which somebody else started: how they are joined, and what is checked before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import EngineError

from slime_sglang.http.client import ConnectionLostError, ServerFaultError, SglangClient
from slime_sglang.settings.section import update_problems
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.protocol import LOADERS, UNSENT


class ExternalServer:
    """Takes the part of a `ServerProcess` for a server that is neither started nor stopped here.

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

    async def stacks(self) -> str:
        """Return nothing: it is another's process."""
        return ""

    async def stop(self) -> None:
        """Leave it: every call in flight fails."""
        self._left.set()

    async def kill(self) -> None:
        """Leave it: every call in flight fails."""
        self._left.set()

    @property
    def failure(self) -> str | None:
        """That it was left; None before."""
        return f"{self.name} is not used any more" if self._left.is_set() else None


async def wake_external(client: SglangClient, name: str, *, timeout_s: float) -> None:
    """Check that a server answers, and resume it: a run that was killed during an update left it paused.

    Raises:
        EngineError: nobody answers, or it cannot.
        DeadlineError: a call took longer than `timeout_s` seconds.
    """
    try:
        await client.get("/model_info", timeout_s=timeout_s)
    except ConnectionLostError as error:
        raise EngineError(f"{name}: nobody answers ({error}); start it first") from error
    try:
        await client.post("/end_weight_update", {}, timeout_s=timeout_s)
    except ServerFaultError:
        raise
    except EngineError:
        pass  # no update is open
    await client.post("/continue_generation", {}, timeout_s=timeout_s)


def check_external(info: Mapping[str, Any], address: str, settings: ServerSettings) -> None:
    """Check that a server serves what this run needs.

    Args:
        info: what it answers to `/server_info` and `/model_info`.
        address: `host:port`.
        settings: of the engine that joins it.

    Raises:
        EngineError: it has another model or dtype, other weights in a run that sends none, does not report routed experts
            where they are needed, or those of one pipeline stage, cannot give up its GPUs' memory in a run that wants it, moves its
            experts or keeps KV caches elsewhere, or has no loader that proves weights.
    """
    where = f"the SGLang server at {address}"
    model_path, dtype = settings.model_path, settings.dtype
    served = str(info.get("model_path"))
    if not _same_model(Path(served), model_path):
        raise EngineError(f"{where}: found the model {served}; wanted {model_path}")
    if not settings.is_updated:
        _check_weights(info, where, model_path=model_path)
    if info.get("dtype") not in (dtype, "auto"):
        raise EngineError(
            f"{where}: found dtype {info.get('dtype')}; wanted {dtype}; start it with --dtype {dtype}, or give "
            "--sglang-dtype"
        )
    if settings.returns_routed_experts and not info.get("enable_return_routed_experts"):
        raise EngineError(
            f"{where}: it does not say which experts each token passed, which this run needs; start it with "
            "--enable-return-routed-experts"
        )
    stages = int(info.get("pp_size") or 1)
    if settings.returns_routed_experts and stages > 1:
        raise EngineError(
            f"{where}: found {stages} pipeline stages, each of which says which experts tokens passed in its own layers alone; "
            "start it with --pp-size 1, as this run needs those of all layers"
        )
    if settings.releases_memory and info.get("device") == "cuda" and not info.get("enable_memory_saver"):
        raise EngineError(
            f"{where}: it cannot give up the memory of its GPUs, which this run wants while it trains; start it with "
            "--enable-memory-saver, or run without --offload-rollout and --colocate"
        )
    for problem in update_problems(info, where=where) if settings.is_updated else ():
        raise EngineError(str(problem))
    if not set(LOADERS) <= set(info.get("custom_weight_loader") or ()):
        raise EngineError(
            f"{where}: found no loader that checks and proves weights; start it with "
            f"--custom-weight-loader {' '.join(LOADERS)}, slime-sglang installed beside it"
        )


def _check_weights(info: Mapping[str, Any], where: str, *, model_path: Path) -> None:
    """Check that a server has the weights of a folder, in a run that sends none."""
    served, version = str(info.get("model_path")), info.get("weight_version")
    if Path(served).resolve() != model_path.resolve():
        raise EngineError(
            f"{where}: found a model of the same shapes in {served}; wanted the weights of {model_path}, as this run "
            "sends none; start it with that folder"
        )
    if version != UNSENT:
        raise EngineError(
            f"{where}: found weights of version {version!r}, which a run sent it; wanted those of {model_path}, as this "
            "run sends none; start it anew"
        )


def _same_model(served: Path, ours: Path) -> bool:
    """Return whether two folders hold a model of the same configuration."""
    if served.resolve() == ours.resolve():
        return True
    theirs, own = served / "config.json", ours / "config.json"
    return theirs.is_file() and theirs.read_bytes() == own.read_bytes()
