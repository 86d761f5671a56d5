"""`BusyTime`: how long at least one of several works was under way, which may be so side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from slime_core.runtime.clock import now


class BusyTime:
    """The length of the union of intervals."""

    def __init__(self) -> None:
        self._n_under_way, self._since, self._closed_s = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Up to now."""
        return self._closed_s + (now() - self._since if self._n_under_way else 0.0)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of the block, once for all blocks that are under way."""
        if not self._n_under_way:
            self._since = now()
        self._n_under_way += 1
        try:
            yield
        finally:
            if self._n_under_way == 1:
                self._closed_s += now() - self._since
            self._n_under_way -= 1
