"""`Kit`: what `slime plugins check` runs over the plugins of a group. Group `slime.kits`, by the name of the group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kit:
    """A contract kit as `slime plugins check` runs it: an entry point of `slime.kits`, named after the group of plugins."""

    check: Callable[[Any], str | None]
    """Called with the object of a plugin; raises ContractError, and returns what it did not try, and why."""
    refusals: tuple[type[BaseException], ...] = ()
    """Errors of a plugin's own by which it says that it is made for other things than the kit asks it with; they break no
    promise."""
    patience_s: float = 5.0
    """Longest that it is waited for, seconds."""
