"""Factories that a user brings: an error of theirs names the setting that chose them, the function and its line."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.errors import TRACEBACK, PluginError, SlimeError
from slime_core.plugins.registry import Registry

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext

logger = logging.getLogger(__name__)


def made(build: BuildContext, group: str, reference: str, *, where: str) -> Any:
    """Return what a plugin's factory makes of a run's `BuildContext`; an error of a user's own names the setting `where`."""
    with naming(build.registry, group, reference, where=where):
        return build.registry.resolve(group, reference)(build)


@contextlib.contextmanager
def naming(registry: Registry, group: str, reference: str, *, where: str) -> Iterator[None]:
    """Tell what a user's own factory raises within the block as an error that names it, and where it raised; logs the traceback.

    What plugins raise that are installed by name passes: to end in it is a mistake of theirs. So does what is logged already.

    Args:
        registry: the installed plugins.
        group: of the factory.
        reference: `module:function`.
        where: the setting that chose it.

    Raises:
        PluginError: it raised.
    """
    try:
        yield
    except SlimeError:
        raise
    except Exception as error:
        plugin = registry.find(group, reference)
        if plugin.distribution or any(note.startswith(TRACEBACK) for note in getattr(error, "__notes__", ())):
            raise
        logger.info("%s: %s raised", where, reference, exc_info=error)
        raise PluginError(
            f"{where}: found {plugin.qualified}, which raised {type(error).__name__}: {str(error)[:300]} "
            f"({_place(error, plugin.value)}); wanted {registry.groups[group].contract}"
        ) from error


def _place(error: Exception, value: str) -> str:
    """Return file and line of the innermost call of a module in a traceback; of any module where it made none."""
    own = getattr(sys.modules.get(value.partition(":")[0]), "__file__", None)
    calls = traceback.extract_tb(error.__traceback__)
    last = next((call for call in reversed(calls) if call.filename == own), calls[-1])
    return f"{last.filename}:{last.lineno}"
