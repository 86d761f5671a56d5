"""The trainer `none`: for `slime eval` of a model as its folder is, also of one that no trainer knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slime_core.config.factories import TrainerFactory
from slime_core.errors import CheckpointError, TrainerError
from slime_core.protocols import Fingerprint, Metrics, TrainerCapabilities, TransferPlan
from slime_core.runtime.phase_times import Phase

if TYPE_CHECKING:
    from slime_core.samples import TrainBatch


class NoTrainer:
    """Holds no model, sends no weights, and refuses to learn."""

    capabilities = TrainerCapabilities(learns=False)

    async def start(self) -> None:
        """Nothing to do."""

    async def train(self, batch: TrainBatch) -> Metrics:
        """Refuse."""
        return _refuse("there is a batch to learn from")

    async def phases(self) -> Sequence[Phase]:
        """Return nothing: it does nothing."""
        return ()

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Refuse: it lists no transport."""
        return _refuse("an engine wants weights")

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Refuse."""
        _refuse("there is something to save")

    async def written(self, wait: bool) -> bool:
        """Return that nothing is being written."""
        return True

    async def load(self, path: Path) -> None:
        """Refuse."""
        raise CheckpointError(
            f"{path}: train_backend is none, which loads no checkpoint; drop --load, or make a Hugging Face folder of "
            "it (slime convert to-hf) and give that as --hf-checkpoint"
        )

    async def save_hf(self, path: Path, merged: bool = False) -> None:
        """Refuse."""
        _refuse("there is something to save")

    async def offload(self) -> None:
        """Nothing to do."""

    async def onload(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""


def _refuse(why: str) -> NoReturn:
    raise TrainerError(f"train_backend is none, and {why}; choose a trainer")


#: The entry point `none` of `slime.trainers`.
create_trainer = TrainerFactory(lambda build: NoTrainer(), NoTrainer.capabilities)
