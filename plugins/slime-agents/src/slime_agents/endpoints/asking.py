"""What a request asks, whichever API it came by, why one is refused, and `Dialect`, one such API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_core.errors import DataError

from slime_agents.tape.messages import Message
from slime_agents.tape.turn import TapeTurn

#: An event of a stream: its name, where the API names events, and its data.
Event = tuple[str | None, Mapping[str, Any] | str]
#: Characters of one delta of a stream.
DELTA = 64


class Refused(Exception):
    """A request is not answered.

    Args:
        status: HTTP status.
        kind: a word for it, which counts are kept by.
        message: where, what was found, what was wanted.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request asks."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    """As OpenAI's Chat Completions has them."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    model: str = "policy"
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the API needs again for its answer."""


class Dialect(Protocol):
    """An API: how its requests are read and its answers are written. A module with these functions is one."""

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> Ask:
        """Return what a request asks.

        Args:
            body: of the request.
            earlier: histories by the ids of answers that they end with.

        Raises:
            DataError: says what of it is wrong, or is not offered here.
        """

    def answer(self, ask: Ask, turn: TapeTurn, answer_id: str) -> dict[str, Any]:
        """Return the body of the answer."""

    def events(self, ask: Ask, turn: TapeTurn, answer_id: str) -> Iterable[Event]:
        """Return the events of the answer, streamed."""

    def error(self, refused: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""


def refuse_fields(body: Mapping[str, Any], fields: Mapping[str, Sequence[Any]]) -> None:
    """Refuse values that would have no effect here.

    Args:
        body: of a request.
        fields: name -> the values that are as good as none.

    Raises:
        DataError: names the field.
    """
    for name, allowed in fields.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            wanted = f"leave it out, or {' or '.join(map(repr, allowed))}" if allowed else "leave it out"
            raise DataError(
                f"{name}: found {str(value)[:60]!r}, which this endpoint does not offer; {wanted}"
            )


def counted(body: Mapping[str, Any], *names: str) -> int | None:
    """Return a positive whole number under the first of several names; None where there is none.

    Raises:
        DataError: it is something else.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{name}: found {value!r}; wanted a whole number above 0")
        return value
    return None


def stops(value: Any, name: str) -> tuple[str, ...]:
    """Return stop sequences: one, or a list.

    Raises:
        DataError: it is something else.
    """
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise DataError(f"{name}: found {str(value)[:60]!r}; wanted text, or a list of texts")
    return tuple(found)


def function_tool(tool: Any, where: str, *, parameters: str = "parameters") -> dict[str, Any]:
    """Return a tool as Chat Completions has it, of an object with its name, description and parameters.

    Raises:
        DataError: it has no name, or parameters that are no object.
    """
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise DataError(f"{where}: found no function with a name; other kinds of tools are not offered here")
    schema = tool.get(parameters) or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise DataError(
            f"{where}.{parameters}: found {type(schema).__name__}; wanted a JSON Schema of an object"
        )
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list of a request, empty where there is none.

    Raises:
        DataError: it is something else.
    """
    value = body.get(name) or []
    if not isinstance(value, list):
        raise DataError(f"{name}: found {type(value).__name__}; wanted a list")
    return value


def deltas(text: str) -> list[str]:
    """Return text in pieces."""
    return [text[i : i + DELTA] for i in range(0, len(text), DELTA)]
