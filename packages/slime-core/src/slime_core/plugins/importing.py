"""Importing `module:attribute`; a module that exits or raises on import is an error that names it."""

from __future__ import annotations

import importlib
from typing import Any

from slime_core.plugins.quick_imports import quick_imports

#: What importing somebody's module may raise: anything, and `sys.exit` is no reason for slime to end without a word.
IMPORT_FAILURES = (Exception, SystemExit)


def import_object(reference: str) -> Any:
    """Return what `module:attribute` (the attribute may be dotted, or missing) names; raises what the import raises."""
    module, _, attribute = reference.partition(":")
    with quick_imports():
        value: Any = importlib.import_module(module)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value
