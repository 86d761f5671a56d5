"""The environment `guess-number`: a game in which the policy finds a number by hints."""

from __future__ import annotations

import re
from typing import Any

from slime_core.errors import SampleError
from slime_core.protocols import Environment, Observation
from slime_core.samples import Sample

#: Longest text that is read as a number: Python refuses to read one of more than 4300 digits.
_MOST_DIGITS = 100


class GuessNumber(Environment):
    """Answers each guess by `higher`, `lower` or `right`; the number is the sample's label.

    The first whole number of a turn is the guess. A right one ends the game with the reward 1.0; every other turn earns 0.0.

    Args:
        low: least number.
        high: greatest number.
    """

    def __init__(self, *, low: int = 1, high: int = 100) -> None:
        self._low, self._high = low, high
        self._secret = 0
        self._guesses = 0

    async def reset(self, sample: Sample) -> None:
        """Think of the sample's number.

        Raises:
            SampleError: its label is not one of the game's numbers.
        """
        label = str(sample.label).strip()
        if not re.fullmatch(r"-?\d+", label) or not self._low <= int(label) <= self._high:
            raise SampleError(
                f"{sample.name}: found the label {sample.label!r}; wanted the number to guess, {self._low} to {self._high}"
            )
        self._secret = int(label)

    async def step(self, sample: Sample, text: str) -> Observation:
        """Compare the guess with the number."""
        self._guesses += 1
        found = re.search(r"-?\d+", text)
        if found is None or len(found[0]) > _MOST_DIGITS:
            return Observation(content="\nA number, please.\n", reward=0.0)
        guess = int(found[0])
        if guess == self._secret:
            return Observation(content="\nright\n", done=True, reward=1.0, info={"guesses": self._guesses})
        hint = "higher" if guess < self._secret else "lower"
        return Observation(content=f"\n{hint}\n", reward=0.0, info={"guess": guess})

    def state(self) -> dict[str, Any]:
        """Return the number of guesses so far."""
        return {"guesses": self._guesses}

    async def restore(self, sample: Sample, state: dict[str, Any]) -> None:
        """Go on after earlier guesses."""
        await self.reset(sample)
        self._guesses = state["guesses"]
