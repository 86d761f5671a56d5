"""The load of an SGLang server, from what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import EngineError
from slime_core.protocols import EngineLoad

#: Counter of the requests that lost their place to others for want of KV cache; absent until there is one.
_RETRACTED = "sglang:num_retracted_requests_total"


def server_load(counted: Any, counters: str, *, waiting_here: int = 0) -> EngineLoad:
    """Return the load of one server.

    Args:
        counted: its answer to `/v1/loads?include=disagg`, one entry for each data-parallel rank; none before it first counted.
        counters: its answer to `/metrics`; without it retractions are unknown, and show only as requests that queue.
        waiting_here: requests for it that have not been sent yet.

    Raises:
        EngineError: the answer is not one of SGLang's.

    Source: SGLang 0.5.23, srt/entrypoints/v1_loads.py and srt/managers/load_snapshot.py. A request whose KV cache is being
    transferred to a decode server is neither running nor queued: it has its room there.
    """
    try:
        ranks = counted["loads"]
        return EngineLoad(
            kv_cache_usage=min(1.0, max((float(rank["token_usage"]) for rank in ranks), default=0.0)),
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            queued=waiting_here + sum(int(rank["num_waiting_reqs"]) - _transferred(rank) for rank in ranks),
            retractions=_total(counters),
        )
    except (KeyError, TypeError, ValueError) as error:
        found = f"found an answer to /v1/loads without {error}: {str(counted)[:200]}"
        raise EngineError(f"{found}; wanted SGLang's") from error


def _transferred(rank: Mapping[str, Any]) -> int:
    return int(rank.get("disaggregation", {}).get("decode_transfer_queue_reqs", 0))


def _total(counters: str) -> int:
    """Return the retractions of all ranks in a text for Prometheus."""
    lines = (line.rsplit(" ", 1) for line in counters.splitlines() if line.startswith(_RETRACTED))
    return int(sum(float(value) for _, value in lines))
