"""Hooks of slime-models."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path

from slime_core.plugins.hooks import hookimpl


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of what reads models and tokenizers."""
    needed = ("torch", "transformers", "safetensors")
    versions = {name: _version(name) or "not installed; slime-models needs it" for name in needed}
    return versions | {"gguf": _version("gguf") or "not installed; `slime-models[smollm2]` brings it"}


@hookimpl
def slime_resolve_model(name: str) -> Path | None:
    """Return the local folder of a model: a folder, a known name, or a hub name."""
    from slime_models.fetch import resolve

    return resolve(name)


@hookimpl
def slime_list_models() -> Iterable[tuple[str, str]]:
    """Return the models that have a short name."""
    from slime_models.fetch import list_models

    return [(model.name, model.summary) for model in list_models()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
