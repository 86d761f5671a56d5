"""Importing megatron-core on a CPU without packages that it does not need there, and without its warnings about itself."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules of Megatron, on a CPU without what cannot work there, which takes a fifth of the time.

    flash_mla raises OSError, not ImportError, without a driver; flash_attn and flashinfer take 14 and 6 s to import, and
    wandb, which Megatron's timers would write to, half a second;
    and `torch.compile`, with which Megatron decorates its fused functions, takes 5 s and would compile C++ later.
    """
    if torch.cuda.is_available():
        with quiet():
            yield
        return
    masked = [name for name in ("flash_attn", "flash_mla", "flashinfer", "wandb") if name not in sys.modules]
    compile_ = torch.compile
    try:
        sys.modules.update(dict.fromkeys(masked))  # type: ignore[arg-type]  # None makes an import fail
        torch.compile = _undecorated  # type: ignore[assignment]  # a plain function in the place of an overloaded one
        with quiet():
            yield
    finally:
        torch.compile = compile_
        for name in masked:
            sys.modules.pop(name, None)


def _undecorated(function: Any = None, **_: Any) -> Any:
    return function if callable(function) else _undecorated


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings that Megatron and torch raise about their own insides.

    They tell of packages that are not installed, of deprecated functions that one calls in the other, and that a
    checkpoint is read by one process.
    """
    loud = logging.getLogger("torch.utils.cpp_extension")
    level = loud.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loud.setLevel(logging.ERROR)
        try:
            yield
        finally:
            loud.setLevel(level)


class StandIn(types.ModuleType):
    """A module that has what `original` has, until an attribute is set."""

    def __init__(self, original: types.ModuleType) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        """Return what was added to the original since."""
        return getattr(self._original, name)
