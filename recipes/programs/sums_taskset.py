"""A taskset of verifiers v1: sums of two numbers of one digit. The reward is 1 where the reply is the sum and nothing else."""

from __future__ import annotations

import random

import verifiers.v1 as vf

EXAMPLES = (("2 + 3", "5"), ("7 + 1", "8"), ("6 + 6", "12"))


class SumData(vf.TaskData):
    """A sum."""

    answer: str = ""


class SumTask(vf.Task[SumData]):
    """Asks for it."""

    @vf.reward
    async def right(self, trace) -> float:
        """Return whether the reply is the sum."""
        return float((trace.last_reply or "").strip() == self.data.answer)


def conversation(question: str) -> list[dict[str, str]]:
    """Return a question after examples with their answers."""
    messages = []
    for shown, answer in EXAMPLES:
        messages += [
            {"role": "user", "content": f"What is {shown}?"},
            {"role": "assistant", "content": answer},
        ]
    return [*messages, {"role": "user", "content": f"What is {question}?"}]


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """All 81, in an order that is the same every time."""

    def load(self):
        """Return the tasks."""
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
        random.Random(0).shuffle(pairs)
        return [SumTask(SumData(prompt=conversation(f"{a} + {b}"), answer=str(a + b))) for a, b in pairs]


__all__ = ["Sums"]
