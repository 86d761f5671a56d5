"""Devices that trainer and engine share (`--colocate`): the idle one offloads its memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import cast

from slime_core.config.sections import ClusterSection
from slime_core.protocols import OffloadsWeights, RolloutEngine, Trainer
from slime_core.runtime.closing import close_all
from slime_core.runtime.deadline import within


class SharedDevices:
    """Offloads and onloads trainer and engine in turn. Both are onloaded at the start, and always without offloading.

    There are three turns: the trainer's; an update's, in which there are the weights of both, and nothing else that can be
    offloaded; and the engine's.

    Args:
        trainer: offloads all but its weights during updates and rollouts if `offload_train` (or `colocate`) is set; and during rollouts
            its weights, too, if it can, and the engine offloads.
        engine: offloads weights and KV cache during training if `offload_rollout` (or `colocate`) is set.
        section: the settings.
        timeout_s: deadline for one change, seconds.
        during: context entered during a change, by its name: `offload`, and in it the trainer's `sleep` and `wake_up`.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: RolloutEngine,
        section: ClusterSection,
        *,
        timeout_s: float,
        during: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._timeout_s, self._during = timeout_s, during
        self._trainer, self._engine = trainer, engine
        self._are_shared = section.shares_devices
        self._offloads_train, self._offloads_rollout = section.offloads_train, section.offloads_rollout
        both = section.offloads_train and section.offloads_rollout
        self._offloads_weights = both and trainer.capabilities.offloads_weights
        self._trainer_is_in = self._engine_is_in = True
        self._trainer_has_weights = True
        self.engine_has_weights = True
        """Whether the engine has weights; after `offload` it has none until `weights_arrived`."""

    async def for_trainer(self) -> None:
        """Offload the engine and onload the trainer, so that it can train.

        Raises:
            DeadlineError: offloading or onloading took longer than `timeout_s`.
        """
        await self._change(self._to_trainer)

    async def for_update(self) -> None:
        """Have the weights of both there, so that the trainer can send and the engine receive; raises as `for_trainer` does."""
        await self._change(self._to_update)

    async def for_engine(self) -> None:
        """Offload the trainer and onload the engine, so that it can generate; raises as `for_trainer` does."""
        await self._change(self._to_engine)

    async def for_last_save(self) -> None:
        """Onload the trainer for the checkpoint of a run that ends early; raises as `for_trainer` does.

        The engine is closed, not offloaded: it may hang, or be what ended the run.
        """
        if self._are_shared and self._offloads_rollout and self._engine_is_in:
            await close_all([self._engine])
            self._engine_is_in = self.engine_has_weights = False
        await self.for_trainer()

    async def _change(self, turn: Callable[[], Awaitable[None]]) -> None:
        if self._are_shared:
            with self._during("offload"):
                await within(self._timeout_s, "offloading (--weight-sync-timeout-s)", turn())

    async def _to_trainer(self) -> None:
        await self._engine_leaves()
        if not self._trainer_is_in:
            with self._during("wake_up"):
                await self._trainer.onload()
            self._trainer_is_in = self._trainer_has_weights = True

    async def _to_update(self) -> None:
        await self._trainer_leaves()
        if not self._trainer_has_weights:
            await self._engine_leaves()  # they have the room of its KV cache
            with self._during("wake_up"):
                await cast(OffloadsWeights, self._trainer).onload_weights()
            self._trainer_has_weights = True
        await self._engine_comes()

    async def _to_engine(self) -> None:
        await self._trainer_leaves()
        if self._offloads_weights and self._trainer_has_weights:
            with self._during("sleep"):
                await cast(OffloadsWeights, self._trainer).offload_weights()
            self._trainer_has_weights = False
        await self._engine_comes()

    async def _trainer_leaves(self) -> None:
        if self._offloads_train and self._trainer_is_in:
            with self._during("sleep"):
                await self._trainer.offload()
            self._trainer_is_in = False

    async def _engine_leaves(self) -> None:
        if self._offloads_rollout and self._engine_is_in:
            await self._engine.offload()
            self._engine_is_in = self.engine_has_weights = False

    async def _engine_comes(self) -> None:
        if not self._engine_is_in:
            await self._engine.onload()
            self._engine_is_in = True

    def weights_arrived(self) -> None:
        """Record that the engine holds the trainer's weights."""
        self.engine_has_weights = True
