"""Load balancing: which of several engines gets a request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

#: How far above the average a session's own engine may be loaded and still get its requests.
_BOUND = 1.25


class HasPendingRequests(Protocol):
    """What the balance needs to know of an engine."""

    @property
    def name(self) -> str:
        """Its name, which it keeps when it is restarted."""
        ...

    @property
    def pending(self) -> int:
        """Its requests, in flight or waiting."""
        ...


def pick[E: HasPendingRequests](engines: Sequence[E], session_id: str | None) -> E:
    """Return the engine for a request; there must be one.

    Without a session it is the one with the fewest requests, the first of several. The requests of a session go to one
    engine, which has their common prefix in its KV cache. Consistent hashing chooses it, so that an engine that leaves or
    joins moves no more sessions than it must. Where that engine has more than `_BOUND` times the average of requests, the
    next one in the session's order is taken.

    Source: rendezvous hashing (Thaler and Ravishankar 1998) with bounded loads (Mirrokni et al., arXiv:1608.01350).
    """
    if session_id is None:
        return min(engines, key=lambda engine: engine.pending)
    share = math.ceil(_BOUND * (1 + sum(engine.pending for engine in engines)) / len(engines))
    ranked = sorted(engines, key=lambda engine: _rank(session_id, engine.name))
    return next(engine for engine in ranked if engine.pending < share)


def _rank(session_id: str, name: str) -> bytes:
    return hashlib.blake2b(f"{session_id}/{name}".encode(), digest_size=8).digest()
