"""The candidate in a response."""

from __future__ import annotations

from slime_rm.code.fences import python_block

_END_OF_THOUGHT = "</think>"


def candidate_of(response: str) -> str | None:
    """Return the last fenced block of Python after the thought, or of no language where there is no such; None without any."""
    block = python_block(response.rpartition(_END_OF_THOUGHT)[2])
    return block if block is not None and block.strip() else None
