"""From the text of a turn to the message that a client gets, and to the calls that a tool loop answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_agents.formats.calls import Malformed, Spoken, ToolCall, ToolFormat
from slime_agents.formats.untyped import typed
from slime_agents.tape.messages import Message

_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A turn, read."""

    reasoning: str
    """What was thought, without its tags."""
    spoken: Spoken
    """The rest, and its calls."""
    text: str
    """The rest as it was written, calls included."""

    @property
    def calls(self) -> tuple[ToolCall | Malformed, ...]:
        """What it calls, or meant to."""
        return self.spoken.calls

    def message(self, call_ids: str) -> Message:
        """Return the message that a client gets. Text that was meant as a call and is none stays text.

        Args:
            call_ids: what ids of calls begin with.
        """
        good = [call for call in self.calls if isinstance(call, ToolCall)]
        whole = len(good) == len(self.calls)
        made: Message = {"role": "assistant", "content": self.spoken.content if whole else self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if good and whole:
            made["tool_calls"] = [
                {
                    "id": f"{call_ids}{i}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for i, call in enumerate(good)
            ]
        return made


def read_turn(text: str, tool_format: ToolFormat | None, tools: Sequence[Mapping[str, Any]] = ()) -> Reading:
    """Read a turn.

    Args:
        text: as it was sampled, without what ended it.
        tool_format: how calls are written; None where no tools are offered: what looks like a call is text then.
        tools: that are offered, as OpenAI's Chat Completions has them.
    """
    thought, closed, rest = text.partition(_THOUGHT)
    if closed:
        reasoning, said = thought.strip().removeprefix(_THINK).strip(), rest
    else:
        reasoning, said = "", text
    spoken = Spoken(said) if tool_format is None else tool_format.read(said)
    spoken = replace(spoken, calls=typed(spoken.calls, tools))
    return Reading(reasoning=reasoning, spoken=spoken, text=said)
