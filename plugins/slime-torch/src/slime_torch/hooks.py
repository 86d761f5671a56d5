"""Hooks of slime-torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from slime_core.config.sections import RolloutSection, TrainSection
from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.weights import transport_problems

from slime_torch.section import TRANSPORTS, TorchSection

if TYPE_CHECKING:
    from slime_core.build import BuildContext


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `torch`."""
    return [Section("torch", TorchSection)]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse a weight transport that the engine lacks."""
    if settings.section(RolloutSection).rollout_engine == "torch":
        yield from transport_problems(settings.section(TrainSection), "engine torch", TRANSPORTS)


@hookimpl
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Refuse a model whose weights the engine cannot generate with."""
    if build.section(RolloutSection).rollout_engine not in ("torch", "slime-torch/torch"):
        return
    from slime_torch.engine import misfit  # imports torch

    if why := misfit(build):
        found = f"torch with {build.model_path}"
        yield Problem("rollout.rollout_engine", found, "an engine that runs the model", why)


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the version of PyTorch."""
    try:
        return {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
        return {"torch": "not installed; slime-torch needs it"}
