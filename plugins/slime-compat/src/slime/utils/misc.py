"""Importing by a dotted path, and singletons."""

from collections.abc import Callable
from typing import Any, ClassVar

from slime_core.plugins.importing import import_object


def load_function(path: str) -> Callable[..., Any]:
    """Return what `module.attribute` or `module:attribute` names."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return import_object(f"{module}:{attribute}")  # type: ignore[no-any-return]  # whatever it names


class SingletonMeta(type):
    """Makes one object of a class."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the object of the class, made by the first call."""
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


__all__ = ["SingletonMeta", "load_function"]
