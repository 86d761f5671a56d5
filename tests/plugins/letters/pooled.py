"""The tabular trainer with a critic that may have ranks of its own: one number, which follows the mean reward.

`CRITICS_TROUBLE=die` kills rank 1 of the critic when it learns in step 3.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from letters.placed import TellingTrainer
from letters.ranked import misbehave
from slime_core.config.build import BuildContext
from slime_core.config.factories import TrainerFactory
from slime_core.protocols import Columns, Metrics, TrainerCapabilities
from slime_core.runtime.phase_times import Phase
from slime_core.samples import TrainBatch
from slime_core.testing import tabular


class PooledPolicy(TellingTrainer):
    """Trains the table when it is credited, and has the critic learn the rewards."""

    async def begin(self, batch: TrainBatch) -> Columns:
        self._batch = batch
        return {}

    async def credit(self, columns: Columns) -> Columns:
        self._value = float(columns["values"][0])
        assert columns["values"].shape == self._batch.loss_mask.shape
        return {"returns": np.repeat(self._batch.raw_rewards, self._batch.response_lengths)}

    async def learn(self, columns: Columns) -> Metrics:
        return await self.train(self._batch) | {"train/value": self._value}


class PooledCritic(TellingTrainer):
    """Has no table."""

    value = 0.0

    async def begin(self, batch: TrainBatch) -> Columns:
        self._batch = batch
        return {"values": np.full(len(batch.loss_mask), self.value, np.float32)}

    async def learn(self, columns: Columns) -> Metrics:
        if self._batch.step == 3 and self._rank.number == 1:
            misbehave(os.environ.get("CRITICS_TROUBLE"))
        self.value += 0.5 * (float(columns["returns"].mean()) - self.value)
        return {"train/critic/ranks": float(self._rank.count)}

    async def phases(self) -> list[Phase]:
        return [Phase("criticism", self._rank.number, 0.0, 0.0)]

    async def save(self, path: Path, in_background: bool = False) -> None:
        (path / "critic.json").write_text(json.dumps(self.value))

    async def written(self, wait: bool) -> bool:
        return True

    async def load(self, path: Path) -> None:
        self.value = json.loads((path / "critic.json").read_text())


CAPABILITIES = TrainerCapabilities(
    transports=("memory",), ranked=True, phases=True, pools=frozenset({"critic"})
)


def _create(build: BuildContext) -> TellingTrainer:
    made = PooledCritic if build.rank.role == "critic" else PooledPolicy
    return made(tabular.create_trainer(build), build.rank)


create_trainer = TrainerFactory(_create, CAPABILITIES)
