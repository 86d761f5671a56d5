"""Launcher `ray`: the trainer's ranks are Ray actors, and servers are started by some; everything else lives in this process."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from slime_core.config.settings import Settings
from slime_core.launch.local import assemble_and
from slime_core.plugins.registry import Registry
from slime_core.run.run import Run
from slime_core.runtime.event_loop import run_event_loop


def launch[T](settings: Settings, registry: Registry, use: Callable[[Run], Awaitable[T]]) -> T:
    """Assemble the run with its trainer's ranks and its servers on Ray, and return what `use` makes of it.

    The cluster is the one that --ray-address or RAY_ADDRESS names; without it, one of this machine alone that ends with the run.

    Raises:
        SlimeError: the run could not be assembled, or what `use` raises.
    """
    set_environment()
    from slime_ray.trainer.trainer import OnRay

    return run_event_loop(lambda stop: assemble_and(use, settings, registry, placement=OnRay(), stop=stop))


def set_environment() -> None:
    """Set what Ray reads when it is imported.

    It sends nobody a report of its use; and under `uv run` its processes use this environment, instead of a new one for
    which the working directory would be packed and shipped.
    """
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"})
