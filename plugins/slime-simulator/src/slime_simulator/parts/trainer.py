"""The simulated trainer: it takes time and learns nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slime_core.errors import CheckpointError
from slime_core.null.trainer import NoTrainer
from slime_core.protocols import Fingerprint, Metrics, TrainerCapabilities, TransferPlan
from slime_core.runtime.clock import now
from slime_core.samples import TrainBatch

from slime_simulator.costs.costs import TrainerCosts, UpdateCosts
from slime_simulator.parts.cores import SharedCores


class SimulatedTrainer(NoTrainer):
    """A `Trainer` that takes as long as its costs say for the tokens of a batch, whose ids are numbers of tokens.

    Args:
        costs: of a step.
        update: of a weight update.
        gpus: that train.
        samples: of a prompt, for which one sample of the batch stands.
        cores: on which it and the engine run.
    """

    capabilities = TrainerCapabilities(transports=("memory",))

    def __init__(
        self, costs: TrainerCosts, update: UpdateCosts, *, gpus: int, samples: int, cores: SharedCores
    ) -> None:
        self._costs, self._update, self._gpus, self._samples = costs, update, gpus, samples
        self._cores = cores
        self.train_s = 0.0
        """Seconds in which it trained."""
        self.tokens = self.samples = 0
        """That it has trained on; tokens of prompts and responses."""

    async def train(self, batch: TrainBatch) -> Metrics:
        """Take the time of the batch."""
        prompts = batch.tokens[batch.offsets[:-1]]  # one of each prompt, which every sample has
        once = int(batch.tokens.sum())
        tokens = once + (self._samples - 1) * int(prompts.sum())
        forwarded = once if self._costs.shares_prompts else tokens
        begin = now()
        await self._cores.train(self._costs.step_s(forwarded, gpus=self._gpus))
        self.train_s += now() - begin
        self.tokens += tokens
        self.samples += self._samples * len(batch)
        return {}

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Take the time of an update."""
        await asyncio.sleep(self._update.send_s)
        return {}

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Nothing to do."""

    async def load(self, path: Path) -> None:
        """Refuse."""
        raise CheckpointError(
            f"{path}: found a checkpoint to load; wanted none: a simulation begins at the first step"
        )

    async def save_hf(self, path: Path, merged: bool = False) -> None:
        """Nothing to do."""

    async def offload(self) -> None:
        """Take the time of leaving the devices."""
        await asyncio.sleep(self._update.switch_s)

    async def onload(self) -> None:
        """Take the time of coming back."""
        await asyncio.sleep(self._update.switch_s)
