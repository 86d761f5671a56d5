"""`Updates`: weight updates of one server, whatever the transport: agreed on, brought to its host, checked, loaded, proven."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from slime_core.errors import DeadlineError, EngineError, WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights import Agreement

from slime_sglang import loader
from slime_sglang.inlets import INLETS, Inlet, Place
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


class Updates:
    """Takes updates, one at a time, and has the server load each when it is there and as it should be.

    Args:
        server: what loads them.
        place: where they come to lie.
        pause_mode: what becomes of requests that are under way.
    """

    def __init__(self, server: Served, place: Place, *, pause_mode: str) -> None:
        self._server, self._place, self._pause_mode = server, place, pause_mode
        self._agreement = Agreement()
        self._inlets: dict[str, Inlet] = {name: make(place) for name, make in INLETS.items()}
        self._kept: Path | None = None
        self.version = "initial"

    def open(self, transport: str, version: str) -> TransferPlan:
        """Agree on an update by `transport`.

        Raises:
            WeightSyncError: no such transport.
        """
        if transport not in self._inlets:
            raise WeightSyncError(
                f"update to version {version}: transport {transport!r}; wanted one of {list(self._inlets)}"
            )
        channel = self._inlets[transport].open(version)
        return self._agreement.open(
            TransferPlan(transport=transport, version=version, dtype=self._place.dtype, channel=channel)
        )

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Take an update in; returns the fingerprints of what the server then holds.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or damaged;
                names it. The server goes on with the old weights.
            EngineError: the server ended or broke off while it was loading; it then serves no more.
        """
        with self._agreement.taking(plan):
            inlet, place = self._inlets[plan.transport], self._place
            try:
                await inlet.arrive(plan)
                held = await self._to_its_end(plan, inlet)
            except BaseException:
                inlet.give_up(plan)
                if place.has_staging:
                    place.staging.forget()
                place.drop_folders(but=self._kept)
                raise
            place.drop_folders(but=self._kept)
            return held

    def close(self) -> None:
        """Free memory and disk. May be called twice."""
        self._place.drop_folders()
        if self._place.has_staging:
            self._place.staging.remove()
            del self._place.staging

    async def _to_its_end(self, plan: TransferPlan, inlet: Inlet) -> Fingerprint:
        """Have the server take the update; a caller that gives up waits until it has, or ends it."""
        work = asyncio.ensure_future(self._at_the_server(plan, inlet))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=_GRACE_S)
            if not work.done():
                await self._server.lose(
                    f"the update to version {plan.version} was given up while it was loading"
                )
                await asyncio.wait({work})
            if (error := work.exception()) is not None:
                logger.warning("given up, and failed itself, which may be why: %s", error)
            raise

    async def _at_the_server(self, plan: TransferPlan, inlet: Inlet) -> Fingerprint:
        version = plan.version
        async with self._paused():
            try:
                await self._server.control("/begin_weight_update", {})
                try:
                    folder = await inlet.folder(
                        plan, lambda function, order: self._call(function, order, version)
                    )
                    order = self._place.order(folder)
                    await self._call(loader.CHECK, order, version)
                    verdict = await self._call(loader.LOAD, order, version, loads=True)
                finally:
                    await self._server.control("/end_weight_update", {})
                check_version(await self._server.model_info(), version)
            except (EngineError, DeadlineError) as error:
                await self._server.lose(
                    f"the update to version {version} broke off, and its weights may be a mixture: {error}"
                )
                raise
        self.version, self._kept = version, folder
        return dict(verdict.held or {})

    async def _call(self, function: str, order: Order, version: str, *, loads: bool = False) -> Verdict:
        """Have the server call a function of `loader`.

        Raises:
            WeightSyncError: it found something wrong.
        """
        payload = pickle.dumps([(order.text(), _EmptyTensor())])
        body = {"serialized_named_tensors": [base64.b64encode(payload).decode()], "load_format": function}
        options = {"weight_version": version} if loads else {"flush_cache": False}
        await self._server.control("/update_weights_from_tensor", body | options)
        verdict = read_verdict(Path(order.answer))
        if verdict.error is not None:
            raise WeightSyncError(f"update to version {version}: {verdict.error}")
        return verdict

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        await self._server.control("/pause_generation", {"mode": self._pause_mode})
        try:
            yield
        finally:
            if self._server.is_running:
                await self._server.control("/continue_generation", {})


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
