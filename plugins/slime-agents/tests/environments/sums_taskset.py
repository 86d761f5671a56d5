"""A taskset of verifiers v1: sums; the reward is 1 where the answer is in the reply."""

from __future__ import annotations

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """A sum."""

    answer: str = ""


class SumTask(vf.Task[SumData]):
    """Asks for it."""

    @vf.reward
    async def right(self, trace) -> float:
        """Return whether the answer is in the reply."""
        return float(self.data.answer in (trace.last_reply or ""))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """n + 2 for n from 0 to 4."""

    def load(self):
        """Return the tasks."""
        return [SumTask(SumData(prompt=f"What is {n} + 2?", answer=str(n + 2))) for n in range(5)]


__all__ = ["Sums"]
