"""`Busy`: how long something was at work, told by how much of it there is."""

from __future__ import annotations

import asyncio


class Busy:
    """Adds up the time, on the event loop's clock, in which a count is above 0."""

    def __init__(self) -> None:
        self._count = 0
        self._since: float | None = None
        self._seconds = 0.0

    def add(self, change: int) -> None:
        """Change the count."""
        self._note()
        self._count += change

    def take(self) -> float:
        """Return the seconds since the last call in which the count was above 0."""
        self._note()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _note(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._count and self._since is not None:
            self._seconds += now - self._since
        self._since = now
