"""Megatron's `mpu` in the files of functions that see whole responses, whatever its context-parallel ranks hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

#: What such a function is told of context parallelism.
_ANSWERS = {
    "get_context_parallel_world_size": 1,
    "get_context_parallel_rank": 0,
    "get_context_parallel_group": None,
}


class OneSequenceRank:
    """`mpu`, but for context parallelism: one rank has all of a sequence; also where Megatron is not set up at all.

    Args:
        real: module of Megatron.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        """Return a function of `mpu`."""
        if name in _ANSWERS:
            return lambda *_, **__: _ANSWERS[name]
        return getattr(self._real, name)


@contextlib.contextmanager
def whole_sequences(function: Callable[..., Any]) -> Iterator[None]:
    """Let the file of a function find `OneSequenceRank` as `mpu` in the block, if it has that name."""
    names = getattr(function, "__globals__", {})
    real = names.get("mpu")
    if real is None:
        yield
        return
    names["mpu"] = OneSequenceRank(real)
    try:
        yield
    finally:
        names["mpu"] = real
