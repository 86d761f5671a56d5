"""Importing `module:attribute`; a module that exits or raises on import is an error that names it."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any

#: What importing somebody's module may raise: anything, and `sys.exit` is no reason for slime to end without a word.
IMPORT_FAILURES = (Exception, SystemExit)

#: Objects that are made between two collections while a module is imported.
_YOUNG = 50_000


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage seldom in the block, which imports something large.

    Modules leave next to none, and collections are a sixth of what torch, Megatron and transformers take to import.
    """
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def import_object(reference: str) -> Any:
    """Return what `module:attribute` (the attribute may be dotted, or missing) names; raises what the import raises."""
    module, _, attribute = reference.partition(":")
    with few_collections():
        value: Any = importlib.import_module(module)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value
