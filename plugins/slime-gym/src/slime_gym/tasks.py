"""reasoning-gym's tasks, by name. The only module that imports reasoning-gym, which takes seconds."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from slime_core.errors import DataError

with warnings.catch_warnings():
    # cellpylib 2.4 compares strings with `is`, and says so whenever Python compiles it.
    warnings.simplefilter("ignore", SyntaxWarning)
    from reasoning_gym.factory import DATASETS, create_dataset


@lru_cache(maxsize=32)
def _cached(name: str, args_json: str, seed: int, size: int) -> Any:
    return create_dataset(name, **json.loads(args_json), seed=seed, size=size)


def task(name: str, args: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Return the reasoning-gym data set `name` of `size` problems; equal arguments make equal problems.

    Raises:
        DataError: there is no such task, or it refuses `args`.
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"gym.task: reasoning-gym has no task {name!r}; {hint}it has {', '.join(sorted(DATASETS))}"
        )
    try:
        return _cached(name, json.dumps(args, sort_keys=True), seed, size)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"gym.task_args: {name} refuses {dict(args)}: {error}; "
            f"see {DATASETS[name][1].__name__} in reasoning-gym"
        ) from error
