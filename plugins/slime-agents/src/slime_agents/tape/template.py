"""`ChatTemplate`: the ids of a conversation's opening, and those between a turn that was sampled and the next one.

A conversation is never rendered as a whole again: templates change earlier turns (Qwen3 drops their thinking), and text that is
encoded again may come out as other ids.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import ConfigError, DataError, Problem
from slime_core.protocols import Tokenizer

from slime_agents.formats.calls import ToolCall, ToolFormat
from slime_agents.formats.hermes import Hermes
from slime_agents.tape.messages import Message

_PROBE: Message = {"role": "user", "content": "a question"}
_PROBED = {"probed": "a value"}
_PROBE_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "probed_tool", "arguments": _PROBED},
        }
    ],
}
_PROBE_RESULT: Message = {
    "role": "tool", "content": "probed result", "name": "probed_tool", "tool_call_id": "call00000",
}  # fmt: skip
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probed_tool",
        "description": "none",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatTemplate:
    """A tokenizer's chat template. What it does not show (tools, calls, results) is written into messages that it does.

    Args:
        tokenizer: with a chat template.
        variables: of the template.
        tool_format: how calls are written; None takes the one that reads the calls which the template writes, and where it shows neither
            tools nor calls the first of those that are known.
        known: formats to choose from then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
        *,
        tool_format: ToolFormat | None = None,
        known: Sequence[ToolFormat] = (Hermes(),),
    ) -> None:
        self._tokenizer, self._variables = tokenizer, dict(variables or {})
        self._shows_calls = "probed_tool" in self._probe([_PROBE, _PROBE_CALL])
        two = {**_PROBE_CALL, "tool_calls": _PROBE_CALL["tool_calls"] * 2}
        self._shows_several_calls = "probed_tool" in self._probe([_PROBE, two])
        self._shows_tools = "probed_tool" in self._probe([_PROBE], tools=[_PROBE_TOOL])
        self._shows_results = "probed result" in self._probe([_PROBE, _PROBE_CALL, _PROBE_RESULT])
        self._format = tool_format or self._written(known)
        if self._format is None and not (self._shows_calls or self._shows_tools):
            self._format = known[0]
        self._default = known[0]

    @property
    def tool_format(self) -> ToolFormat:
        """How calls are written, where tools are offered.

        Raises:
            ConfigError: nobody says, as the template shows tools or calls in a form that no known format reads.
        """
        if self._format is not None:
            return self._format
        raise ConfigError([self._unread()])

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids of a conversation up to where the policy speaks.

        Raises:
            DataError: the template refuses the messages.
            ConfigError: tools are offered, and nobody says how calls of them are written.
        """
        return self._tokenizer.encode(self._render(messages, tools, answer=True))

    def between(
        self, new: Sequence[Message], tools: Sequence[Any] | None = None, *, last_id: int | None
    ) -> list[int]:
        """Return the ids between a turn that was sampled and the policy's next one.

        They are what the template writes between an assistant's text that stands in for the turn and the next place to speak.

        Args:
            new: messages after the turn.
            tools: of the conversation.
            last_id: the turn's last id if it ends turns, as the end of the sequence does; None where the turn was cut off.

        Raises:
            DataError: the template refuses the messages, or does not show what an assistant says.
            ConfigError: as `opening`.
        """
        mark = self._mark(new)
        stand_in: Message = {"role": "assistant", "content": mark}
        try:
            whole = self._render([_PROBE, stand_in, *new], tools, answer=True)
        except DataError:  # some want the calls that results answer
            whole = ""
        _, found, after = whole.rpartition(mark)
        if not found:
            after = self._after_calls(new, tools, mark)
        return self._without_end(self._tokenizer.encode(after), last_id)

    @functools.cached_property
    def turn_end(self) -> str:
        """What the template writes after an assistant's text: `<|im_end|>` and a line break, or nothing.

        Raises:
            DataError: it does not show what an assistant says.
        """
        mark = self._mark([])
        text = self._render([_PROBE, {"role": "assistant", "content": mark}], None, answer=False)
        _, found, after = text.rpartition(mark)
        if not found:
            raise DataError("the chat template does not show what an assistant says; choose another model")
        return after

    def _after_calls(self, new: Sequence[Message], tools: Sequence[Any] | None, mark: str) -> str:
        """Return what follows a turn, for a template that wants the calls that results answer."""
        ids = [one.get("tool_call_id", "call00000") for one in new if one["role"] == "tool"]
        calls = [{**_PROBE_CALL["tool_calls"][0], "id": one} for one in ids]
        stand_in: Message = {"role": "assistant", "content": mark, **({"tool_calls": calls} if calls else {})}
        own = self._render([_PROBE, stand_in], tools, answer=False).rpartition(mark)[2]
        whole = self._render([_PROBE, stand_in, *new], tools, answer=True).rpartition(mark)[2]
        if not whole.startswith(own):
            raise DataError(
                "the chat template changes what follows a turn with what comes later; what stands between two turns "
                "cannot be found"
            )
        return self.turn_end + whole[len(own) :]

    def _without_end(self, ids: list[int], last_id: int | None) -> list[int]:
        """Return ids without the end of the turn, if it was sampled: as the template has it, or another one in its place."""
        if last_id is None or not ids:
            return ids
        end = self._tokenizer.encode(self.turn_end) if self.turn_end else []
        is_special = bool(end) and end[0] == ids[0] and not self._tokenizer.decode(end[:1])
        return ids[1:] if ids[0] == last_id or is_special else ids

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, answer: bool) -> str:
        shown = [self._shown(message) for message in messages]
        written = self.tool_format if tools else None
        if tools and written and not self._shows_tools:
            told = written.describe(tools)
            if shown and shown[0]["role"] == "system":
                told = f"{shown[0]['content']}\n\n{told}"
                shown = shown[1:]
            shown = [{"role": "system", "content": told}, *shown]
        return self._tokenizer.apply_chat_template(
            shown,
            tools=list(tools) if tools and self._shows_tools else None,
            **{**self._variables, "add_generation_prompt": answer},
        )

    def _shown(self, message: Message) -> Message:
        """Return a message as the template can show it."""
        shown = self._shows_several_calls if len(message.get("tool_calls", ())) > 1 else self._shows_calls
        if message.get("tool_calls") and not shown:
            calls = [_as_call(call) for call in message["tool_calls"]]
            parts = [message["content"], (self._format or self._default).write(calls)]
            return {"role": "assistant", "content": "\n".join(part for part in parts if part)}
        if message["role"] == "tool" and not self._shows_results:
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        return message

    def _probe(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """Return how messages are rendered; nothing if they are refused."""
        variables = {**self._variables, "add_generation_prompt": False}
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **variables)
        except Exception:  # templates are programs of their own: one may raise anything where it lacks a key
            return ""

    def _written(self, known: Sequence[ToolFormat]) -> ToolFormat | None:
        """Return the format that reads the call that the template writes; None where there is none."""
        after = self._probed_call()
        for one in known:
            for begin in _begins(after):
                for call in one.read(after[begin:]).calls:
                    if isinstance(call, ToolCall) and (call.name, call.arguments) == ("probed_tool", _PROBED):
                        return one
        return None

    def _probed_call(self) -> str:
        """Return a turn with a call as the template writes it; nothing where it shows none."""
        as_text = copy.deepcopy(
            _PROBE_CALL
        )  # some templates want arguments as text, or a turn that only calls without content
        as_text["tool_calls"][0]["function"]["arguments"] = json.dumps(_PROBED)
        for call in (_PROBE_CALL, as_text, {**_PROBE_CALL, "content": None}):
            for tools in (None, [_PROBE_TOOL]):
                after = self._probe([_PROBE, call], tools).rpartition(_PROBE["content"])[2]
                if _PROBED["probed"] in after:
                    return after.removesuffix(self._probed_end())
        return ""

    def _unread(self) -> Problem:
        """Return what is wrong where no format reads what the template shows."""
        call = self._probed_call()
        written = (
            f"writes calls as {call.strip()[:200]!r}" if call else "shows tools, and does not show calls"
        )
        where = getattr(self._tokenizer, "folder", None) or type(self._tokenizer).__name__
        return Problem(
            "agents.tool_format",
            f"none, and the chat template of {where} {written}, which none of the known formats reads",
            "how the model writes calls",
            "name it (json, xml, qwen3_coder, llama), or write one for the group slime.tool_formats",
        )

    def _probed_end(self) -> str:
        try:
            return self.turn_end
        except Exception:  # as above; who needs it is told
            return ""

    def _mark(self, new: Sequence[Message]) -> str:
        """Return text that no message holds."""
        held, mark, n = json.dumps([*new], default=str), "[a turn that was sampled]", 0
        while mark in held:
            n += 1
            mark = f"[a turn that was sampled, {n}]"
        return mark


def _begins(text: str) -> list[int]:
    """Return where a call may begin in a rendered turn: at its start, or at a brace."""
    return [0, *(i for i, letter in enumerate(text) if letter == "{")]


def _as_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    return ToolCall(function["name"], arguments if isinstance(arguments, dict) else {"arguments": arguments})
