"""Loading a function from a file or a module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_core.errors import PluginError


def load_function(place: str, name: str) -> Callable[..., Any]:
    """Return function `name` of `place`: a file `rewards/math.py`, or an importable module `rewards.math`.

    Raises:
        PluginError: there is no such place or function.
    """
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise PluginError(f"{place}: has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return function  # type: ignore[no-any-return]  # checked to be callable above


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise PluginError(f"{path}: found nothing; wanted the file of the reward")
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look there for their module
    spec.loader.exec_module(module)
    return module
