"""The tabular trainer as if it were two ranks that say what they did: times that are known in advance."""

from __future__ import annotations

import asyncio
import dataclasses

from slime_core.config.factories import TrainerFactory
from slime_core.protocols import Metrics
from slime_core.runtime.phase_times import Phase
from slime_core.samples import TrainBatch
from slime_core.testing import tabular
from slime_core.testing.tabular import TabularTrainer


class PhasedTrainer:
    """Takes 50 ms a step, of which rank 0 tells 1 to 11 ms, and rank 1 tells 2 to 12 ms."""

    capabilities = dataclasses.replace(TabularTrainer.capabilities, phases=True)

    def __init__(self, inner: TabularTrainer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def train(self, batch: TrainBatch) -> Metrics:
        await asyncio.sleep(0.05)
        return await self._inner.train(batch)

    async def phases(self) -> list[Phase]:
        return [
            phase
            for rank in (0, 1)
            for phase in (
                Phase("forward_backward", rank, 0.001 + 0.001 * rank, 0.005),
                Phase("optimizer_step", rank, 0.001 + 0.001 * rank, 0.01),
            )
        ]


create_trainer = TrainerFactory(
    lambda build: PhasedTrainer(tabular.create_trainer(build)), PhasedTrainer.capabilities
)
