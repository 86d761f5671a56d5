"""`Loading`: has one server check an update, load it, and prove it."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from slime_core.errors import DeadlineError, EngineError, WeightSyncError
from slime_core.protocols import Fingerprint

from slime_sglang.inlets import Update
from slime_sglang.loader import CHECK, LOAD, Order, Verdict, read_verdict

logger = logging.getLogger(__name__)

#: Seconds that an update at the server gets to end by itself when its caller gives up.
_GRACE_S = 10.0


class Served(Protocol):
    """What an update needs of a server."""

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call it."""

    async def model_info(self) -> Mapping[str, Any]:
        """Return what it says about its model."""

    async def lose(self, why: str) -> None:
        """End it: its weights cannot be trusted."""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""

    is_quiet: bool
    """Whether it is not to generate now."""


class Loading:
    """Updates of one server.

    Args:
        server: what loads them.
        pause_mode: what becomes of requests that are under way.
        answer: file for the server's verdicts.
    """

    def __init__(self, server: Served, *, pause_mode: str, answer: Path) -> None:
        self._server, self._pause_mode, self._answer = server, pause_mode, answer

    async def load(self, update: Update) -> Fingerprint:
        """Have the server take an update; returns the fingerprints of what it then holds.

        A caller that gives up waits until the server has taken it or refused it, or ends the server.

        Raises:
            WeightSyncError: a tensor was damaged on its way, or is wrong; names it. The old weights serve.
            EngineError: the server ended or broke off while it was loading; it then serves no more.
        """
        work = asyncio.ensure_future(self._at_the_server(update))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=_GRACE_S)
            if not work.done():
                await self._server.lose(
                    f"the update to version {update.version} was given up while it was loading"
                )
                await asyncio.wait({work})
            if (error := work.exception()) is not None:
                logger.warning("given up, and failed itself, which may be why: %s", error)
            raise

    async def _at_the_server(self, update: Update) -> Fingerprint:
        async with self._paused():
            try:
                await self._server.control("/begin_weight_update", {})
                try:
                    held = await self._load(update)
                finally:
                    await self._server.control("/end_weight_update", {})
                check_version(await self._server.model_info(), update.version)
            except (EngineError, DeadlineError) as error:
                await self._server.lose(
                    f"the update to version {update.version} broke off, and its weights may be a mixture: {error}"
                )
                raise
        return held

    async def _load(self, update: Update) -> Fingerprint:
        async def call(function: str, order: Order, **options: Any) -> Verdict:
            order = replace(order, folder=str(update.folder), answer=str(self._answer))
            return await self._call(function, order, update.version, options or {"flush_cache": False})

        if update.fetch is not None:
            await update.fetch(call)
        await call(CHECK, Order())
        verdict = await call(LOAD, Order(), weight_version=update.version)
        return dict(verdict.held or {})

    async def _call(self, function: str, order: Order, version: str, options: Mapping[str, Any]) -> Verdict:
        """Have the server call a function of `loader`.

        Raises:
            WeightSyncError: it found something wrong.
        """
        payload = pickle.dumps([(order.text(), _EmptyTensor())])
        body = {"serialized_named_tensors": [base64.b64encode(payload).decode()], "load_format": function}
        await self._server.control("/update_weights_from_tensor", body | dict(options))
        verdict = read_verdict(self._answer)
        if verdict.error is not None:
            raise WeightSyncError(f"update to version {version}: {verdict.error}")
        return verdict

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        was_quiet, self._server.is_quiet = self._server.is_quiet, True
        await self._server.control("/pause_generation", {"mode": self._pause_mode})
        try:
            yield
        finally:
            if self._server.is_running:
                await self._server.control("/continue_generation", {})
            self._server.is_quiet = was_quiet


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


class _EmptyTensor:
    """Pickles as an empty tensor, without torch's reducers, which Megatron replaces by some that SGLang refuses."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return torch.Tensor, ()
