"""Hooks of slime-compat: it tells functions that were written for the reference system, and brings what calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.plugins.adapter import Adapter
from slime_core.plugins.hooks import hookimpl

from slime_compat.adapters.table import adapter_of


@hookimpl
def slime_adapt_plugin(group: str, flag: str | None, reference: str, value: Any) -> Adapter | None:
    """Return the adapter of a function with the reference system's signature."""
    return adapter_of(group, flag, reference, value)


@hookimpl
def slime_read_file(path: Path) -> Any:
    """Read YAML.

    Raises:
        ValueError: it is none; says where.
    """
    if path.suffix not in (".yaml", ".yml"):
        return None
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
