"""Importing by a dotted path, singletons, and this host."""

from collections.abc import Callable
from typing import Any, ClassVar

from slime_compat.launch.commands import exec_command
from slime_compat.views.running.absent import lacking
from slime_compat.views.running.host import get_current_node_ip, get_free_port
from slime_compat.views.training.schedule import should_run_periodic_action
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

    @classmethod
    def clear_all_instances(cls) -> None:
        """Forget all objects."""
        cls._instances.clear()


class Box:
    """A value that is passed on as it is."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        """The value."""
        return self._inner


__all__ = [
    "Box",
    "SingletonMeta",
    "exec_command",
    "get_current_node_ip",
    "get_free_port",
    "load_function",
    "should_run_periodic_action",
]
__getattr__ = lacking(
    __name__,
    {
        "chunk_named_params_by_size": "weights are sent by transports; use --update-weight-buffer-size",
        "decode_int32_meta_array": "answers of the engine are read by Sample.append_response_tokens",
    },
)
