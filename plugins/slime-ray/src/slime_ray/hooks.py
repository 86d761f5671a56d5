"""Hooks of slime-ray: its section, and checks of the launcher and of what it is to place. Imports neither ray nor torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.plugins.own_name import means

from slime_ray.section import RaySection

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext

#: This launcher.
_OURS = "slime-ray/ray"


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `ray`."""
    return [Section("ray", RaySection)]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse the launcher where Ray is not installed."""
    launcher = settings.run.launcher
    if means(launcher, _OURS) and importlib.util.find_spec("ray") is None:
        yield Problem("run.launcher", f"{launcher!r} and no Ray", "Ray", "pip install ray")


@hookimpl
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Refuse sizes of ranks and servers that no machine has room for, or that do not fit each other."""
    if not means(build.settings.run.launcher, _OURS):
        return
    from slime_ray.placement.plan import make_plan, needs_of

    try:
        make_plan(needs_of(build), gpus_per_node=build.settings.cluster.num_gpus_per_node)
    except ConfigError as error:
        yield from error.problems


@hookimpl
def slime_placement(build: BuildContext) -> Iterable[str]:
    """Return where ranks, servers and workers of rewards will be; which of the cluster's machines these are is known at the start."""
    if not means(build.settings.run.launcher, _OURS):
        return
    from slime_ray.placement.plan import make_plan, needs_of, table

    needs, size = needs_of(build), build.settings.cluster.num_gpus_per_node
    if size is None:
        yield "as if machines had room for all of it; --num-gpus-per-node says how large they are, else the cluster's largest does"
    yield from table(needs, make_plan(needs, gpus_per_node=size))
    cores, n_hosts = build.settings.reward.reward_workers, build.section(RaySection).reward_num_nodes
    here = ["loop", "rollout", "router" if needs.engine.processes else "engine"]
    if n_hosts is None:
        here += ["workers of rewards"]
    else:
        yield f"rewards: workers of each on {cores} cores of {n_hosts} machines"
    yield f"the process that is started: {', '.join(here)}"


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the version of Ray."""
    try:
        return {"ray": importlib.metadata.version("ray")}
    except importlib.metadata.PackageNotFoundError:
        return {"ray": "not installed; slime-ray needs it"}
