"""What the distributions of slime bring: what a message says of a name, a section or a flag of one that is not installed.

`index.json` holds it, written by `scripts/generate_docs.py`; a test fails when it is stale.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


@functools.cache
def brought() -> Mapping[str, Any]:
    """Return distribution -> what it brings: `groups`, `plugins` (group -> names), `sections`, `flags`, and `prefixes` of flags."""
    text = (files("slime_core.plugins") / "index.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def home_of_name(group: str, name: str) -> str | None:
    """Return the distribution that brings a plugin of this name, None where none does."""
    return next((home for home, has in brought().items() if name in has["plugins"].get(group, ())), None)


def names(group: str) -> list[str]:
    """Return the names of a group that some distribution brings."""
    return [name for has in brought().values() for name in has["plugins"].get(group, ())]


def home_of_group(name: str) -> str | None:
    """Return the distribution that brings a group, None where none does."""
    return next((home for home, has in brought().items() if name in has["groups"]), None)


def home_of_section(name: str) -> str | None:
    """Return the distribution that brings a section, None where none does."""
    return next((home for home, has in brought().items() if name in has["sections"]), None)


def home_of_flag(*spellings: str) -> str | None:
    """Return the distribution that brings a flag (underscores, no dashes) of one of these spellings, None where none does."""
    for home, has in brought().items():
        for name in spellings:
            if name in has["flags"] or name.startswith(tuple(has["prefixes"])):
                return home
    return None
