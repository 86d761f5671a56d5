"""Messages between the judge and the processes of an evaluation: JSON, and the bytes of arrays behind it.

Reading one runs no code, whoever wrote it. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_SIZE = 8


def pack(header: dict[str, Any], buffers: Sequence[bytes | memoryview] = ()) -> bytes:
    """Return a message of a JSON object and some buffers."""
    sizes = [len(buffer) for buffer in buffers]
    head = json.dumps({"header": header, "buffers": sizes}).encode()
    return b"".join([len(head).to_bytes(_SIZE, "little"), head, *buffers])


def unpack(message: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the object and the buffers of a message.

    Raises:
        ValueError: it is no whole message.
    """
    size = int.from_bytes(message[:_SIZE], "little")
    if not 0 < size <= len(message) - _SIZE:
        raise ValueError("no message")
    said = json.loads(message[_SIZE : _SIZE + size])
    sizes, header = said["buffers"], said["header"]
    if not isinstance(header, dict) or sum(sizes) != len(message) - _SIZE - size or min(sizes, default=0) < 0:
        raise ValueError("a message whose buffers are not what it says")
    buffers, begin = [], _SIZE + size
    for length in sizes:
        buffers.append(message[begin : begin + length])
        begin += length
    return header, buffers
