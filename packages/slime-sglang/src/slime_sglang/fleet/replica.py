"""`Replica`: one engine of a fleet, and those that replace it when it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from slime_sglang.engine import SglangEngine


class Replica:
    """One of several engines of a model; another engine takes its place when it is lost.

    Args:
        name: how messages call it: `engine 0`.
        make: makes an engine that is not started, from the number of those before it.
        restarts: how many may follow the first.
    """

    def __init__(self, name: str, make: Callable[[int], SglangEngine], *, restarts: int) -> None:
        self.name, self._make, self._restarts_left = name, make, restarts
        self._n_made = 0
        self.engine = self._next()
        self.state: Literal["starting", "waiting", "serving", "gone"] = "starting"
        """Where it is `waiting`, its engine has started, and waits for an update, as it has initial weights."""
        self.reason = ""
        """Why the engine before was lost."""

    @property
    def pending(self) -> int:
        """Requests of its engine, in flight or waiting."""
        return self.engine.pending

    @property
    def is_ready(self) -> bool:
        """Whether its engine can get requests."""
        return self.state == "serving" and self.engine.failure is None

    @property
    def is_waiting(self) -> bool:
        """Whether its engine can get an update, and no requests before."""
        return self.state == "waiting" and self.engine.failure is None

    def lose(self, reason: str) -> None:
        """Count the engine as lost: it gets no more requests."""
        self.state, self.reason = "starting", reason

    def replace(self) -> bool:
        """Replace the engine that is lost by another, not yet started; False where no restart is left."""
        if self._restarts_left <= 0 or self.engine.is_external:
            self.state = "gone"
            return False
        self._restarts_left -= 1
        self.engine = self._next()
        return True

    def _next(self) -> SglangEngine:
        self._n_made += 1
        return self._make(self._n_made - 1)
