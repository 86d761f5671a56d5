"""Methods of Megatron's distributed optimizer, which `compat` puts in the place of its own: gathering and loading its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
