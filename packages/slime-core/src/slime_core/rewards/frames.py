"""What goes between a pool, a keeper and a worker: frames of a header, then that many bytes.

Jobs are pickles (a `Sample`, or a list of them); replies are JSON, so that nothing which a reward's process
says is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

#: Length of the payload in bytes, and the number of the job.
HEADER = struct.Struct("<QQ")
#: A longer reply is garbage.
MAX_REPLY_BYTES = 1 << 28


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


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Return the next (number, payload); None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, number = HEADER.unpack(header)
    payload = stream.read(length)
    return (number, payload) if len(payload) == length else None
