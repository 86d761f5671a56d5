"""Methods of Megatron's distributed optimizer, which `compat` puts in the place of its own: gathering and loading its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def without_steps(original: Any, hit: Callable[[], None]) -> Any:
    """Let a distributed optimizer load what has no number of steps for each parameter; see `compat.Redirect.replace`."""

    @functools.wraps(original)
    def replacement(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        if "step" not in tensors:
            hit()
            tensors = {**tensors, "step": None}
        return original(self, model_param, tensors)

    return replacement


def on_the_first_rank(original: Any, hit: Callable[[], None]) -> Any:
    """Let a distributed optimizer gather its state, or make room to read it, on the first of its ranks alone."""

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, return_on_all_ranks: bool = False, **kwargs: Any) -> Any:
        if return_on_all_ranks:
            hit()
        return original(self, *args, **kwargs)

    return replacement


def where_gathered(original: Any, hit: Callable[[], None]) -> Any:
    """Let a distributed optimizer take parameters from where they are in its gathered state, which has no padding between buckets.

    Megatron 0.19.2 looks for them where they are in the gradient buffer, whose buckets are padded at their ends: so it saves of all
    parameters behind such an end what is in part the next one's, and reads it alike.
    """

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_buffers = [buffer.param_index_map for buffer in self.buffers]
        for buffer, places in zip(self.buffers, of_buffers, strict=True):
            buffer.param_index_map = _without_padding(places, buffer.buckets)
            if buffer.param_index_map != places:
                hit()
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, of_buffers, strict=True):
                buffer.param_index_map = places

    return replacement


def _without_padding(
    places: dict[Any, tuple[int, int, int]], buckets: Sequence[Any]
) -> dict[Any, tuple[int, int, int]]:
    """Return (start, end, number of its bucket) of each parameter if all buckets but the last had no padding at their ends."""
    shifts, left_out = [], 0
    for bucket in buckets:
        shifts.append(left_out)
        left_out += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        weight: (start - shifts[number], end - shifts[number], number)
        for weight, (start, end, number) in places.items()
    }
