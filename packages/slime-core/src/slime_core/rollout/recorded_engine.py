"""`RecordedEngine`: the engine as the generator of one sample sees it: what it asks is taken down in the run's events."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.protocols import Completion, Generates, SamplingParams
from slime_core.rundir.events import ENGINE, EventLog
from slime_core.runtime.clock import now
from slime_core.samples import Sample


class RecordedEngine:
    """Tells each request as a span when it is over, in the lane of the replica that answered, if the engine names it.

    Args:
        engine: answers the requests.
        events: of the run.
        sample: which the requests are for.
        evaluation: whether it is not for training.
    """

    def __init__(self, engine: Generates, events: EventLog, sample: Sample, *, evaluation: bool) -> None:
        self.engine = engine
        """What answers."""
        self._events, self._n = events, 0
        self._sample, self._group, self._evaluation = sample.index, sample.group_index, evaluation

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response, and tell how long it took; one that fails has `finish_reason` `error`."""
        begin, answer = now(), None
        self._n += 1
        number, n_before = self._n, len(tokens)
        try:
            if images:  # an engine that sees none need not take them
                answer = await self.engine.generate(tokens, params, session_id=session_id, images=images)
            else:
                answer = await self.engine.generate(tokens, params, session_id=session_id)
            return answer
        finally:
            metadata = {} if answer is None else answer.metadata
            more = {"timings": timings} if (timings := metadata.get("timings")) else {}
            self._events.span(
                "request",
                lane=str(metadata.get("replica") or ENGINE),
                begin=begin,
                seconds=now() - begin,
                request=number,
                prompt_tokens=n_before,
                tokens=0 if answer is None else len(answer.tokens),
                finish_reason="error" if answer is None else answer.finish_reason,
                weight_version=None if answer is None else answer.weight_version,
                sample=self._sample,
                group=self._group,
                evaluation=self._evaluation,
                **more,
            )
