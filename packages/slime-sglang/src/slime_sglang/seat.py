"""`Seat`: one place of a fleet, and the engines that hold it one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from slime_sglang.engine import SglangEngine


class Seat:
    """One engine of a fleet, which another takes the place of when it is lost.

    Args:
        name: how messages call it: `engine 0`.
        make: makes an engine that is not started, from how many were there before.
        restarts: how many may follow the first.
    """

    def __init__(self, name: str, make: Callable[[int], SglangEngine], *, restarts: int) -> None:
        self.name, self._make, self._left = name, make, restarts
        self._made = 0
        self.engine = self._next()
        self.state: Literal["starting", "serving", "gone"] = "starting"
        self.reason = ""
        """Why the engine before was lost."""

    @property
    def pending(self) -> int:
        """Requests that its engine has."""
        return self.engine.pending

    @property
    def is_ready(self) -> bool:
        """Whether its engine can be asked."""
        return self.state == "serving" and self.engine.failure is None

    def lose(self, reason: str) -> None:
        """Count the engine as lost: it gets nothing more."""
        self.state, self.reason = "starting", reason

    def replace(self) -> bool:
        """Take another engine, not yet started, for the one that is lost; False where it had its last."""
        if self._left <= 0 or self.engine.is_external:
            self.state = "gone"
            return False
        self._left -= 1
        self.engine = self._next()
        return True

    def _next(self) -> SglangEngine:
        self._made += 1
        return self._make(self._made - 1)
