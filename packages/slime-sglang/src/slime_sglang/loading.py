"""`Loading`: having one server check an update, load it, and prove what it then holds."""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from slime_core.errors import DeadlineError, EngineError, WeightSyncError
from slime_core.protocols import Fingerprint

from slime_sglang import loader
from slime_sglang.inlets import FindFolder
from slime_sglang.loader import Order, Verdict, read_verdict

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
    """Has a server take updates that lie whole in a folder.

    Args:
        server: what loads them.
        answer: file for its verdicts.
        pause_mode: what becomes of requests that are under way.
    """

    def __init__(self, server: Served, *, answer: Path, pause_mode: str) -> None:
        self._server, self._answer, self._pause_mode = server, answer, pause_mode

    async def load(self, version: str, find: FindFolder) -> Fingerprint:
        """Have the server take an update; a caller that gives up waits until it has, or ends it.

        Raises:
            WeightSyncError: the server or `find` found something wrong. The server goes on with the old weights.
            EngineError: the server ended or broke off; it then serves no more.
        """
        work = asyncio.ensure_future(self._at_the_server(version, find))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=_GRACE_S)
            if not work.done():
                await self._server.lose(f"the update to version {version} was given up while it was loading")
                await asyncio.wait({work})
            if (error := work.exception()) is not None:
                logger.warning("given up, and failed itself, which may be why: %s", error)
            raise

    async def _at_the_server(self, version: str, find: FindFolder) -> Fingerprint:
        async with self._paused():
            try:
                await self._server.control("/begin_weight_update", {})
                try:
                    folder = await find(functools.partial(self._call, version))
                    await self._call(version, loader.CHECK, folder)
                    verdict = await self._call(version, loader.LOAD, folder)
                finally:
                    await self._server.control("/end_weight_update", {})
                check_version(await self._server.model_info(), version)
            except (EngineError, DeadlineError) as error:
                await self._server.lose(
                    f"the update to version {version} broke off, and its weights may be a mixture: {error}"
                )
                raise
        return dict(verdict.held or {})

    async def _call(self, version: str, function: str, folder: Path, **more: Any) -> Verdict:
        """Have the server call a function of `loader` for the update in a folder.

        Raises:
            WeightSyncError: it found something wrong.
        """
        order = Order(folder=str(folder), answer=str(self._answer), **more)
        payload = pickle.dumps([(order.text(), _EmptyTensor())])
        body = {"serialized_named_tensors": [base64.b64encode(payload).decode()], "load_format": function}
        options = {"weight_version": version} if function == loader.LOAD else {"flush_cache": False}
        await self._server.control("/update_weights_from_tensor", body | options)
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
