"""The engine `none`: for runs that generate nothing, such as supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.config.build import BuildContext
from slime_core.errors import EngineError
from slime_core.protocols import Completion, EngineCapabilities, Fingerprint, SamplingParams, TransferPlan


class NoEngine:
    """Takes no memory and no weights, and refuses to generate."""

    capabilities = EngineCapabilities()

    async def start(self) -> None:
        """Nothing to do."""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Refuse."""
        raise EngineError(
            "rollout_engine is none and something wants to generate; choose an engine, or drop what generates "
            "(--eval-interval none; --rollout-function-path sft)"
        )

    async def abort(self) -> None:
        """Nothing to do."""

    async def pause(self) -> None:
        """Nothing to do."""

    async def resume(self) -> None:
        """Nothing to do."""

    async def offload(self) -> None:
        """Nothing to do."""

    async def onload(self) -> None:
        """Nothing to do."""

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Refuse: it lists no transport."""
        raise EngineError("rollout_engine is none: it takes no weights")

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Refuse: it lists no transport."""
        raise EngineError("rollout_engine is none: it takes no weights")

    async def close(self) -> None:
        """Nothing to do."""


def create_engine(build: BuildContext) -> NoEngine:
    """Return the engine that is none."""
    return NoEngine()
