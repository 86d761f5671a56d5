"""Hooks of slime-ray: its section, and a check of the launcher. Imports neither ray nor torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping

from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.plugins.hooks import Section, hookimpl

from slime_ray.section import RaySection


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `ray`."""
    return [Section("ray", RaySection)]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse the launcher where Ray is not installed."""
    launcher = settings.run.launcher
    if launcher in ("ray", "slime-ray/ray") and importlib.util.find_spec("ray") is None:
        yield Problem("run.launcher", f"{launcher!r} and no Ray", "Ray", "pip install ray")


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the version of Ray."""
    try:
        return {"ray": importlib.metadata.version("ray")}
    except importlib.metadata.PackageNotFoundError:
        return {"ray": "not installed; slime-ray needs it"}
