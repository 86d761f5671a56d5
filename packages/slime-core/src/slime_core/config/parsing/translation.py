"""`Translation`: what a command line that was written for another program means here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Another program's command line in words of slime; see the hook `slime_translate`."""

    origin: str
    """Where `slime config show` says that values of `defaults` come from: `preset slime`."""
    recipes: Sequence[str] = ()
    """Recipes that it names."""
    flags: Sequence[str] = ()
    """Its flags, as slime's own."""
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section -> setting -> value, where neither recipes nor flags give one: the other program's own defaults, and what follows from
    its flags."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the run that it gives by flags, such as keys, which settings never hold."""
    notes: Sequence[str] = ()
    """What became of flags that slime has not, a line each."""
    warnings: Sequence[str] = ()
    """What is otherwise than the command line says, told whenever it is read."""
    problems: Sequence[Problem] = ()
    """Flags that slime cannot follow."""
