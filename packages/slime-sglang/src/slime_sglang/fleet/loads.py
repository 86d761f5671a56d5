"""`FleetLoads`: the load of several engines together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slime_core.protocols import EngineLoad

from slime_sglang.engine import SglangEngine


class FleetLoads:
    """Reads the loads of the engines of a fleet, and remembers the retractions of those that were lost."""

    def __init__(self) -> None:
        self._retractions: dict[SglangEngine, int] = {}

    async def read(self, engines: Sequence[SglangEngine], *, some: bool, waiting: int) -> EngineLoad:
        """Return the load of engines; the fullest KV cache is that of all.

        Args:
            engines: those to ask.
            some: whether it is enough if one answers.
            waiting: requests that no engine has yet.

        Raises:
            EngineError: none told it; without `some`, one did not.
            DeadlineError: as above.
        """
        answers = await asyncio.gather(*(engine.current_load() for engine in engines), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        loads = {
            engine: answer
            for engine, answer in zip(engines, answers, strict=True)
            if isinstance(answer, EngineLoad)
        }
        if errors and not (some and loads):
            raise errors[0]
        self._retractions |= {engine: load.retractions for engine, load in loads.items()}
        return EngineLoad(
            kv_cache_usage=max((load.kv_cache_usage for load in loads.values()), default=0.0),
            running=sum(load.running for load in loads.values()),
            queued=waiting + sum(load.queued for load in loads.values()),
            retractions=sum(self._retractions.values()),
            replicas=max(1, len(loads)),
        )
