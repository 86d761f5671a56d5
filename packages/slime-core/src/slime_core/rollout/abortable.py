"""`AbortableEngine`: the engine as generators see it, for which an abort is final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_core.protocols import Completion, RolloutEngine, SamplingParams


class AbortableEngine:
    """An engine that ends requests under way when it is aborted, and from then on answers each at once, with no tokens.

    A generator of several turns that is inside a tool call has no request under way: it learns of the abort from its
    next one, which names the weights of the newest answer. All but `generate` and `abort` is the engine's own.

    Args:
        engine: of the run.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._is_aborted = False
        self._version = ""

    def __getattr__(self, name: str) -> Any:
        """Return what the engine has by this name."""
        return getattr(self._engine, name)

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None, **more: Any
    ) -> Completion:
        """Generate one response, if nothing was aborted; `more` is what the engine takes besides, images for example."""
        if self._is_aborted:
            return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version=self._version)
        completion = await self._engine.generate(tokens, params, session_id=session_id, **more)
        self._version = completion.weight_version
        return completion

    async def abort(self) -> None:
        """End every request under way and all that will come."""
        self._is_aborted = True
        await self._engine.abort()
