"""The wire format between pool, fork server and worker: a header with the length, then that many bytes.

Jobs are pickles (a `Sample`, or a list of them); replies are JSON, so that nothing which a reward's process
says is ever unpickled. Numbers of jobs are drawn at random: a reward cannot answer a job that it has not been given.
"""

from __future__ import annotations

import json
import math
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from slime_core.rewards.results import Failed, plain_value

#: Length of the payload in bytes, and the number of the job.
HEADER = struct.Struct("<QQ")
#: A longer reply is garbage.
MAX_REPLY_BYTES = 1 << 24
#: What a fork server says while it waits for a reward, so that silence means that it is stopped.
ALIVE: Mapping[str, Any] = {"alive": True}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker is to run."""

    reference: str
    """The reward, `module:attr`."""
    options: Mapping[str, Any]
    """Its options."""
    timeout_s: float
    """Deadline of one call, seconds."""
    start_timeout_s: float
    """Deadline for a process to import the reward, seconds."""
    memory_bytes: int | None
    """Most address space of a process."""


def frame(number: int, payload: bytes) -> bytes:
    """Return the frame of job `number`."""
    return HEADER.pack(len(payload), number) + payload


def job_number() -> int:
    """Return the number of a new job."""
    return secrets.randbits(64)


def read_reply(payload: bytes) -> dict[str, Any]:
    """Return the JSON object of a reply, which a reward may have written behind our back.

    Raises:
        ValueError: it is none, or has another form than the replies of `fork_server` and `worker`.
    """
    try:
        reply: Any = json.loads(payload)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    if not isinstance(reply, dict):
        raise ValueError(f"a reply that is {type(reply).__name__}")
    if not any(_is_form(reply, form) for form in _FORMS):
        raise ValueError("a reply without outcomes")
    return reply


def _is_form(reply: Mapping[str, Any], form: Mapping[str, Callable[[Any], bool]]) -> bool:
    return set(reply) == set(form) and all(check(reply[key]) for key, check in form.items())


def _is_outcome(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    if set(entry) == {"value"}:
        is_value = isinstance(entry["value"], float | dict)
        return is_value and not isinstance(plain_value(entry["value"]), Failed)
    return set(entry) == {"kind", "what"} and _is_failure([entry["kind"], entry["what"]])


def _is_failure(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)
    return is_pair and value[0] in ("raised", "deadline", "crashed", "invalid")


_FORMS: tuple[Mapping[str, Callable[[Any], bool]], ...] = (
    {
        "seconds": lambda value: isinstance(value, float) and 0 <= value < math.inf,
        "outcomes": lambda value: isinstance(value, list) and all(map(_is_outcome, value)),
    },
    {"failed": _is_failure},
    {"error": lambda value: isinstance(value, str)},
    {"is_async": lambda value: isinstance(value, bool)},
    {"alive": lambda value: value is True},
)


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Return the next (number, payload); None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, number = HEADER.unpack(header)
    payload = stream.read(length)
    return (number, payload) if len(payload) == length else None
