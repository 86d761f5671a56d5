"""Hooks of slime-sglang. Imports neither torch nor sglang."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from slime_core.plugins.hooks import hookimpl


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the version of SGLang."""
    try:
        return {"sglang": importlib.metadata.version("sglang")}
    except importlib.metadata.PackageNotFoundError:
        return {"sglang": "not installed; slime-sglang needs it"}
