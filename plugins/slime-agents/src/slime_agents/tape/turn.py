"""`TapeTurn`: one answer of the policy in a session, and `Fork`: why a session's history has branches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime_agents.formats.calls import Malformed, ToolCall
from slime_agents.tape.messages import Message


@dataclass(kw_only=True)
class TapeTurn:
    """One answer of the policy."""

    number: int
    """Of its session, from 0, in the order in which turns began."""
    branch: int
    """Of the tape, from 0."""
    message: Message
    """What was said, as `tape.messages` has it."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_string: str | None
    """That ended it; it is not in the message."""
    calls: tuple[ToolCall | Malformed, ...]
    """What it calls, also what cannot be read; empty where no tools are offered."""
    n_prompt: int
    """Tokens that it was generated from."""
    n_sampled: int
    """Tokens that were sampled."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A branch that began where a client changed its history."""

    branch: int
    """That began."""
    parent: int | None
    """Whose beginning it shares; None where it shares none."""
    shared_turns: int
    """Turns of the parent in what it shares."""
    shared_tokens: int
    """Tokens that it shares."""
    reason: str
    """What the client changed."""

    def to_json(self) -> dict[str, Any]:
        """Return it for a record."""
        return {
            "branch": self.branch,
            "parent": self.parent,
            "shared_turns": self.shared_turns,
            "shared_tokens": self.shared_tokens,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Mark:
    """A place on a branch at which another one can begin."""

    n_messages: int
    """Of its history."""
    n_tokens: int
    """Of its tokens."""
    n_turns: int
    """Before it."""
    last_id: int | None = field(default=None)
    """The id that ended the turn, where that ends turns."""
