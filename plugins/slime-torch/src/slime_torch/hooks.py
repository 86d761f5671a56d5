"""Hooks of slime-torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping

from slime_core.plugins.hooks import Section, hookimpl

from slime_torch.section import TorchSection


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `torch`."""
    return [Section("torch", TorchSection)]


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the version of PyTorch."""
    try:
        return {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
        return {"torch": "not installed; slime-torch needs it"}
