"""`Building`: what a data source of the reference system reaches of its run while it is built."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from slime_core.config.build import BuildContext
from slime_core.data.file_source import create_source
from slime_core.errors import PluginError
from slime_core.protocols import DataSource


@dataclasses.dataclass(frozen=True)
class Building:
    """The run that a data source is built for."""

    build: BuildContext

    def prompts(self) -> DataSource:
        """Return the run's own source of `--prompt-data`."""
        return create_source(self.build)


_BUILDING: contextvars.ContextVar[Building] = contextvars.ContextVar("slime_compat_building")


def building() -> Building:
    """Return the run that a data source is built for.

    Raises:
        PluginError: none is built now.
    """
    found = _BUILDING.get(None)
    if found is None:
        raise PluginError(
            "RolloutDataSource needs a run: choose it, or a class that derives from it, by --data-source-path"
        )
    return found


@contextlib.contextmanager
def built_for(build: BuildContext) -> Iterator[None]:
    """Let data sources that are made in the block find their run."""
    token = _BUILDING.set(Building(build))
    try:
        yield
    finally:
        _BUILDING.reset(token)
