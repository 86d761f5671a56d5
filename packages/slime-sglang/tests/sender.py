"""The sending half of a trainer, of tensors that a test gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from slime_core.plugins.registry import Registry
from slime_core.protocols import Fingerprint, TrainerCapabilities, TransferPlan
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.sender import WeightSender
from torch import Tensor


class Sender:
    """Sends its tensors as they are when they are asked for, and calls `midway` when all but the end is sent."""

    capabilities = TrainerCapabilities(other_transports=True)

    def __init__(self, tensors: dict[str, Tensor], midway: Callable[[], None] = lambda: None) -> None:
        self.tensors, self._midway = tensors, midway
        self._sender = WeightSender(asyncio.to_thread, Registry())

    async def _buckets(self) -> AsyncIterator[tuple[list[tuple[str, Tensor]], dict[str, Fingerprint]]]:
        yield list(self.tensors.items()), {name: fingerprint(tensor) for name, tensor in self.tensors.items()}
        self._midway()

    async def send(self, plan: TransferPlan) -> dict[str, Fingerprint]:
        return await self._sender.send(plan, self._buckets())
