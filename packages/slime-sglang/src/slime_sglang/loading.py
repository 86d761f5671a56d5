"""One server loads an update that lies whole on its host: it checks it, takes it in, and says what it then holds."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from slime_core.errors import DeadlineError, EngineError, WeightSyncError
from slime_core.protocols import Fingerprint

from slime_sglang import loader
from slime_sglang.loader import Order, Verdict, read_verdict
from slime_sglang.staging import Update

logger = logging.getLogger(__name__)

#: Seconds that an update at the server gets to end by itself when its caller gives up.
_GRACE_S = 10.0


class Served(Protocol):
    """What an update needs of a server."""

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call it."""

    async def model_info(self) -> Mapping[str, Any]:
        """Return what it says about its model."""

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Have it generate nothing within the context."""

    async def lose(self, why: str) -> None:
        """End it: its weights cannot be trusted."""


async def load_update(server: Served, update: Update, *, n_ranks: int, answers: Path) -> Fingerprint:
    """Have a server check an update and load it; returns the fingerprints of what it then holds.

    Args:
        server: whose host sees the update's folder.
        update: that stays as it is meanwhile.
        n_ranks: of the server.
        answers: folder for the verdicts of its ranks, which its host sees, too.

    Raises:
        WeightSyncError: the bytes are not those that were sent; names the tensors. The server has the old weights.
        EngineError: the server ended or broke off while it was loading; it then serves no more.
        DeadlineError: it did not answer in time; it then serves no more.
    """
    version = update.version

    def orders() -> list[Order]:
        # Names of their own for each call: of one that was looked for before, a network's file system may say for a
        # while yet that it is not there.
        once = answers / f"verdict-{secrets.token_hex(8)}"
        return [
            Order(folder=str(update.folder), answer=f"{once}-{rank}.json", rank=rank, n_ranks=n_ranks)
            for rank in range(n_ranks)
        ]

    async with server.paused():
        try:
            await server.control("/begin_weight_update", {})
            try:
                await _call(server, loader.CHECK, orders(), version)
                verdicts = await _call(server, loader.LOAD, orders(), version, loads=True)
            finally:
                await server.control("/end_weight_update", {})
            check_version(await server.model_info(), version)
        except (EngineError, DeadlineError) as error:
            await server.lose(
                f"the update to version {version} broke off, and its weights may be a mixture: {error}"
            )
            raise
    return together([verdict.held or {} for verdict in verdicts], update.fingerprint)


async def to_its_end[T](work: Coroutine[Any, Any, T], end: Callable[[], Awaitable[None]]) -> T:
    """Await work; a caller that gives up waits until it is done, or calls `end`, which must end it, if that takes long."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_GRACE_S)
        if not task.done():
            await end()
            await asyncio.wait({task})
        if (error := task.exception()) is not None:
            logger.warning("given up, and failed itself, which may be why: %s", error)
        raise


def check_version(info: Mapping[str, Any], version: str) -> None:
    """Check that a server says it has the version that it was to load.

    Raises:
        EngineError: it says another.
    """
    if info.get("weight_version") != version:
        raise EngineError(
            f"update to version {version}: the server says afterwards that it has version "
            f"{info.get('weight_version')!r}"
        )


def together(held: Sequence[Fingerprint], sent: Fingerprint) -> Fingerprint:
    """Return what all ranks hold: of each tensor that every rank has its part of, whatever is not what was sent."""
    names = set(held[0]).intersection(*held[1:])
    return {
        name: next((part[name] for part in held if part[name] != sent.get(name)), held[0][name])
        for name in names
    }


def provable_ranks(info: Mapping[str, Any], wanted: int | None) -> int:
    """Return the ranks of a server whose weights can be proven; `wanted` of them, where that is not None.

    Raises:
        EngineError: it has others.
    """
    sizes = {name: int(info.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size", "ep_size")}
    n_ranks = sizes.pop("tp_size")
    if any(size != 1 for size in sizes.values()):
        raise EngineError(
            f"the SGLang server has {sizes}; weights that arrive are proven for tensor-parallel ranks only: leave all "
            "three at 1"
        )
    if wanted not in (None, n_ranks):
        raise EngineError(f"the SGLang server has {n_ranks} tensor-parallel ranks; wanted {wanted}")
    return n_ranks


async def _call(
    server: Served, function: str, orders: Sequence[Order], version: str, *, loads: bool = False
) -> list[Verdict]:
    """Have each rank of the server call a function of `loader`.

    Raises:
        WeightSyncError: one found something wrong.
    """
    payloads = [pickle.dumps([(order.text(), _EmptyTensor())]) for order in orders]
    body = {
        "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
        "load_format": function,
    }
    options = {"weight_version": version} if loads else {"flush_cache": False}
    await server.control("/update_weights_from_tensor", body | options)
    verdicts = [read_verdict(Path(order.answer)) for order in orders]
    errors = sorted({verdict.error for verdict in verdicts if verdict.error is not None})
    if errors:
        raise WeightSyncError(f"update to version {version}: {'; '.join(errors)}")
    return verdicts


class _EmptyTensor:
    """Pickles as an empty tensor, without torch's reducers, which Megatron replaces by some that SGLang refuses."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return torch.Tensor, ()
