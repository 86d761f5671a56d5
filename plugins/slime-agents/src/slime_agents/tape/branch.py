"""`Branch`: one line of history of a session, and the sample that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_core.samples import Sample

from slime_agents.tape.messages import Message, n_same
from slime_agents.tape.turn import Mark, TapeTurn


@dataclass(kw_only=True)
class Branch:
    """One line of history. Only ever appended to.

    `sample.tokens` are its whole history. What it shares with an earlier branch is the prompt of its sample, so that no sampled
    id is trained on twice; what came after is the response.
    """

    number: int
    sample: Sample
    tools: str
    """What tells tools apart: those of another request are the same if this is."""
    messages: list[Message] = field(default_factory=list)
    """All that was said, its own last turn included."""
    ends: list[Mark] = field(default_factory=list)
    """Where turns end, those that it shares included."""
    asked: list[tuple[Mark, TapeTurn]] = field(default_factory=list)
    """Where the policy was asked, of its own turns, and what it answered."""
    is_busy: bool = False
    """Whether a turn is being generated."""

    @property
    def turns(self) -> list[TapeTurn]:
        """Its own turns."""
        return [turn for _, turn in self.asked]

    def goes_on(self, messages: list[Message], tools: str) -> bool:
        """Return whether a request's history is this one and something after it."""
        if self.is_busy or tools != self.tools or len(messages) <= len(self.messages):
            return False
        return n_same(self.messages, messages) == len(self.messages)

    def shared(self, messages: list[Message], tools: str) -> Mark | None:
        """Return the last place up to which a request's history is this one's; None without any."""
        if tools != self.tools:
            return None
        n = n_same(self.messages, messages)
        places = [mark for mark in self.ends if mark.n_messages <= n and mark.n_messages < len(messages)]
        places += [mark for mark, _ in self.asked if mark.n_messages == len(messages) <= n]
        return max(places, key=lambda mark: mark.n_tokens, default=None)
