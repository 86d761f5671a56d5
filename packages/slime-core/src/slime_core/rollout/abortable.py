"""`AbortableEngine`: the engine as generators see it: after an abort no further request is sent."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.protocols import Completion, RolloutEngine, SamplingParams


class AbortableEngine:
    """Ends requests in flight when it is aborted; from then on every request returns at once with finish reason `abort`.

    A generator of several turns that is inside a tool call has no request in flight: it learns of the abort from its
    next one, which names the weights of the newest answer.

    Args:
        engine: of the run.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._is_aborted = False
        self._version = ""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response, or return an empty completion after an abort."""
        if self._is_aborted:
            return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version=self._version)
        shown = {"images": images} if images else {}  # an engine that sees none need not take them
        completion = await self._engine.generate(tokens, params, session_id=session_id, **shown)
        self._version = completion.weight_version
        return completion

    async def abort(self) -> None:
        """Abort every request in flight and all later ones."""
        self._is_aborted = True
        await self._engine.abort()
