"""Hooks of slime-compat: it tells functions that were written for the reference system, and brings what calls them."""

from __future__ import annotations

from typing import Any

from slime_core.plugins.adapter import Adapter
from slime_core.plugins.hooks import hookimpl

from slime_compat.adapters.table import adapter_of


@hookimpl
def slime_adapt_plugin(group: str, flag: str | None, reference: str, value: Any) -> Adapter | None:
    """Return the adapter of a function with the reference system's signature."""
    return adapter_of(group, flag, reference, value)
