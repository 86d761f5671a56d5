"""Devices that trainer and engine share (`--colocate`): the idle one offloads its memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from slime_core.config.sections import ClusterSection
from slime_core.protocols import RolloutEngine, Trainer
from slime_core.runtime.deadline import within


class SharedDevices:
    """Offloads and onloads trainer and engine in turn. Both are onloaded at the start, and always without offloading.

    Args:
        trainer: offloads all but its weights during rollouts if `offload_train` (or `colocate`) is set.
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
        self._trainer_is_in = self._engine_is_in = True
        self._has_weights = True

    async def for_trainer(self) -> None:
        """Offload the engine and onload the trainer, so that it can train.

        Raises:
            DeadlineError: offloading or onloading took longer than `timeout_s`.
        """
        if self._are_shared:
            await self._change(self._to_trainer)

    async def for_engine(self) -> bool:
        """Offload the trainer, which can still send weights, and onload the engine; returns whether the engine has its weights.

        After `offload` it has none until `weights_arrived`. Raises as `for_trainer` does.
        """
        if self._are_shared:
            await self._change(self._to_engine)
        return self._has_weights

    async def _change(self, turn: Callable[[], Awaitable[None]]) -> None:
        with self._during("offload"):
            await within(self._timeout_s, "offloading (--weight-sync-timeout-s)", turn())

    async def _to_trainer(self) -> None:
        if self._offloads_rollout and self._engine_is_in:
            await self._engine.offload()
            self._engine_is_in = self._has_weights = False
        if not self._trainer_is_in:
            with self._during("wake_up"):
                await self._trainer.onload()
            self._trainer_is_in = True

    async def _to_engine(self) -> None:
        if self._offloads_train and self._trainer_is_in:
            with self._during("sleep"):
                await self._trainer.offload()
            self._trainer_is_in = False
        if not self._engine_is_in:
            await self._engine.onload()
            self._engine_is_in = True

    def weights_arrived(self) -> None:
        """Record that the engine holds the trainer's weights."""
        self._has_weights = True
