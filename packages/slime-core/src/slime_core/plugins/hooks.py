"""What a hook module is made of: the mark of its functions, and the sections of settings that it adds.

`slime_core.hookspecs` says which hooks there are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pluggy

#: Marks a function as the specification of a hook; its module is listed in the entry-point group `slime.hookspecs`.
hookspec = pluggy.HookspecMarker("slime")
#: Marks a function of a plugin's hook module as its answer to the hook of the same name.
hookimpl = pluggy.HookimplMarker("slime")


@dataclass(frozen=True)
class ForeignFlags:
    """Flags of a program that a plugin drives, taken by name as if they were fields of a section."""

    field: str
    """Field of the section, `dict[str, Any]`, that holds those given: name -> text, list of texts, or True."""
    names: Collection[str]
    """Their names, dashes as underscores."""
    prefix: str = ""
    """Put before each name to make its flag: `sglang_`. A flag of slime's own that is spelled alike comes first."""
    refused: Collection[str] = ()
    """Those that the plugin's checks refuse whatever the value: known, and never proposed for a misspelling."""

    @property
    def followed(self) -> list[str]:
        """The names that may be proposed."""
        return [name for name in self.names if name not in self.refused]


@dataclass(frozen=True)
class Section:
    """A table of settings that a plugin adds to recipes and flags."""

    name: str
    """Name of the TOML table."""
    model: type[Any]
    """Frozen pydantic model; the docstring below each field is its help text."""
    prefix: str | None = None
    """Put before each field's name to make its flag. None means the section's name; "" leaves the field's name
    alone, for words that the whole field uses."""
    foreign: ForeignFlags | None = None
    """Flags of another program that this section hands through."""
    read_by: Collection[str] | None = ()
    """Names of the distribution's plugins that read it; empty for all of them. Its flags are refused where none is chosen.
    None: it is read whatever is chosen, as by hooks."""
