"""What Megatron sees on a CPU in the place of what is CUDA's, or of what it would compile."""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor


class StandIn(types.ModuleType):
    """A module that has what `original` has, until an attribute is set."""

    def __init__(self, original: types.ModuleType) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        """Return what was added to the original since."""
        return getattr(self._original, name)


class Stream:
    """The one stream of a CPU, and its events: whatever was issued is done."""

    def record_event(self) -> Stream:
        """Return an event, which is the stream."""
        return self

    def synchronize(self, *_: Any) -> None:
        """Wait for nothing."""

    wait = wait_stream = synchronize


def refill(emptied: Tensor, again: Tensor) -> None:
    """Copy what was computed again into the storage of a tensor that was emptied, for all its views; no version is counted up."""
    storage, source = emptied.untyped_storage(), again.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)
