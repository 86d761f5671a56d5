"""Simulated rewards: they take time, and are all alike."""

from __future__ import annotations

import asyncio

from slime_core.rewards.results import Reward
from slime_core.samples import Group, Sample


class SimulatedRewards:
    """In the place of a `Scorer`: every sample gets the score 1 after a time.

    Args:
        seconds: of each; as many as there are samples run beside each other.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def asks(self, sample: Sample) -> bool:
        """Return True: every sample is scored."""
        return True

    async def score(self, sample: Sample) -> Reward:
        """Score one sample."""
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return Reward(score=1.0, value=1.0, seconds=self._seconds)

    async def score_group(self, group: Group) -> list[Reward]:
        """Score a group."""
        reward = await self.score(group[0])
        return [reward] * len(group)

    async def close(self) -> None:
        """Nothing to do."""
