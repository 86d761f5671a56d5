"""Functions that tests offer as tools."""

from __future__ import annotations

import time


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def later(text: str, n: int = 2) -> dict:
    """Repeat a text."""
    return {"text": text * n}


def hang() -> str:
    """Never answer."""
    time.sleep(3)
    return "too late"


def leave() -> str:
    """Leave the process."""
    raise SystemExit("goodbye")


def long() -> str:
    """Say much."""
    return "x" * 100_000


def strange() -> str:
    """Say what is no text."""
    return "half \ud83d"


def untyped(a):
    """Have no types."""


def positional(a: int, /) -> int:
    """Take what has no name."""
    return a


not_a_function = 7
