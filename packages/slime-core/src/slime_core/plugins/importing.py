"""Importing `module:attribute`; a module that exits or raises on import is an error that names it."""

from __future__ import annotations

import importlib
import signal
from typing import Any

from slime_core.plugins.quick_imports import quick_imports

#: What importing somebody's module may raise: anything, and `sys.exit` is no reason for slime to end without a word.
IMPORT_FAILURES = (Exception, SystemExit)


def import_object(reference: str) -> Any:
    """Return what `module:attribute` (the attribute may be dotted, or missing) names; raises what the import raises.

    Raises:
        ImportError: the module raised what is no `Exception`, and would end more than its import.
    """
    module, _, attribute = reference.partition(":")
    try:
        with quick_imports():
            value: Any = importlib.import_module(module)
    except IMPORT_FAILURES:
        raise
    except BaseException as error:
        if (
            isinstance(error, KeyboardInterrupt)
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            raise  # of the keyboard, as far as can be told; under a command it comes as `Interrupted`
        raise ImportError(f"the module raises {type(error).__name__}: {error}") from error
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value
