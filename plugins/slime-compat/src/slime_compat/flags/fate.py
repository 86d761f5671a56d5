"""`Fate`: what becomes of a flag of the reference system that is not simply slime's own of that name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Fate:
    """What becomes of one flag."""

    kind: Literal["mapped", "follows", "refused"]
    """`mapped` to other settings; `follows`: it holds without it; `refused`."""
    what: str
    """What it is mapped to, why it holds, or why it is refused."""
    instead: str = ""
    """Of one that is refused: what to use."""
    to: str | None = None
    """Flag of slime (underscores) that gets its values as they are; None where `launch.rules` says what it is mapped to."""
    values: Sequence[str] = ()
    """Of one that follows: the values that it holds for, others are refused; empty for all of them."""
    until_ours: bool = field(default=False)
    """Whether a flag of this name that slime, or an installed plugin, has is taken in its place."""


def mapped(what: str, *, to: str | None = None) -> Fate:
    """Return the fate of a flag that becomes something else."""
    return Fate("mapped", what, to=to)


def follows(why: str, *values: str) -> Fate:
    """Return the fate of a flag that nothing need be done for, of these values or of any."""
    return Fate("follows", why, values=values)


def refused(why: str, instead: str = "") -> Fate:
    """Return the fate of a flag that cannot be followed; one of slime's own of that name is taken in its place."""
    return Fate("refused", why, instead, until_ours=True)
