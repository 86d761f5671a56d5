"""Hooks of slime-models."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from slime_core.plugins.hooks import hookimpl


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of what reads models and tokenizers."""
    needed = ("torch", "transformers", "safetensors")
    versions = {name: _version(name) or "not installed; slime-models needs it" for name in needed}
    return versions | {"gguf": _version("gguf") or "not installed; `slime-models[smollm2]` brings it"}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
