"""The concurrency limit of a run whose requests somebody else holds back."""

from __future__ import annotations

from slime_core.rollout.concurrency import ConcurrencyLimit


class OpenLimit(ConcurrencyLimit):
    """Lets every request through at once; who derives from it says when further groups would gain nothing."""

    async def enter(self, owner: object) -> bool:
        """Let a request through."""
        return True

    def leave(self, *, answered: bool) -> None:
        """Nothing to do."""
