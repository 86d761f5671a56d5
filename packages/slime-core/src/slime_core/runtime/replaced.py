"""`replaced`: a frozen dataclass with other values, where one is made for each sample."""

from __future__ import annotations

from typing import Any


def replaced[T](value: T, **changes: Any) -> T:
    """Return a dataclass with some fields changed, as `dataclasses.replace` does, in a fifth of its time.

    Args:
        value: a dataclass without slots and `__post_init__`; it is left as it is.
        changes: new values, by field.
    """
    before, other = vars(value), object.__new__(type(value))
    after = before | changes
    assert len(after) == len(before), f"{type(value).__name__} lacks one of {sorted(changes)}"
    object.__setattr__(other, "__dict__", after)  # past a frozen class
    return other
