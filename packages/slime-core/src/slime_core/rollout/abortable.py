"""`AbortableEngine`: the engine as generators see it: behind the run's limit, and after an abort no further request is sent."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.protocols import Completion, RolloutEngine, SamplingParams
from slime_core.rollout.concurrency import ConcurrencyLimit


class AbortableEngine:
    """Ends requests in flight when it is aborted; from then on every request returns at once with finish reason `abort`.

    So do those that wait at the limit. A generator of several turns that is inside a tool call has no request in flight: it
    learns of the abort from its next one, which names the weights of the newest answer, or where its group is surplus from
    `GenerateContext.over`.

    Args:
        engine: of the run.
        limit: of the run, which its requests pass.
    """

    def __init__(self, engine: RolloutEngine, limit: ConcurrencyLimit) -> None:
        self._engine, self._limit = engine, limit
        self._is_aborted = False
        self._version = ""
        self.has_ended_requests = False
        """Whether a request was ended before it was answered, by whomever."""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response once the limit lets it through, or return an empty completion after an abort."""
        if self._is_aborted or not await self._limit.enter(self):
            return self._nothing()
        answered = False
        try:
            if self._is_aborted:  # after it was let through, and before it ran
                return self._nothing()
            shown = {"images": images} if images else {}  # an engine that sees none need not take them
            completion = await self._engine.generate(tokens, params, session_id=session_id, **shown)
            answered = completion.finish_reason != "abort"
            self.has_ended_requests |= not answered
        finally:
            self._limit.leave(answered=answered)
        self._version = completion.weight_version
        return completion

    async def abort(self) -> None:
        """Abort every request in flight or waiting, and all later ones."""
        self._is_aborted = True
        self._limit.turn_away(self)
        await self._engine.abort()

    def _nothing(self) -> Completion:
        return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version=self._version)
