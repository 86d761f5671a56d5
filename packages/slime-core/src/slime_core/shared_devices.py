"""Devices that a trainer and an engine share: who is not at work gives its memory up."""

from __future__ import annotations

from slime_core.config.sections import ClusterSection
from slime_core.protocols import RolloutEngine, Trainer


class SharedDevices:
    """Says who has its memory. All do from the start, and always where nothing is to be given up.

    Args:
        trainer: gives up all but its weights while samples are generated, if `offload_train` (or `colocate`) says so.
        engine: gives up weights and cache while the trainer is at work, if `offload_rollout` (or `colocate`) says so.
        section: the settings.
    """

    def __init__(self, trainer: Trainer, engine: RolloutEngine, section: ClusterSection) -> None:
        self._trainer, self._engine = trainer, engine
        self._offloads_train, self._offloads_rollout = section.offloads_train, section.offloads_rollout
        self._trainer_is_in = self._engine_is_in = True
        self._has_weights = True

    @property
    def are_shared(self) -> bool:
        """Whether anybody ever gives memory up."""
        return self._offloads_train or self._offloads_rollout

    async def for_trainer(self) -> None:
        """Let the trainer work."""
        if self._offloads_rollout and self._engine_is_in:
            await self._engine.offload()
            self._engine_is_in = self._has_weights = False
        if not self._trainer_is_in:
            await self._trainer.onload()
            self._trainer_is_in = True

    async def for_engine(self) -> bool:
        """Let the engine work, and the trainer send; returns whether the engine has its weights.

        It has none after it gave its memory up, until `weights_arrived`.
        """
        if self._offloads_train and self._trainer_is_in:
            await self._trainer.offload()
            self._trainer_is_in = False
        if not self._engine_is_in:
            await self._engine.onload()
            self._engine_is_in = True
        return self._has_weights

    def weights_arrived(self) -> None:
        """Take note that the engine holds the trainer's weights."""
        self._has_weights = True
