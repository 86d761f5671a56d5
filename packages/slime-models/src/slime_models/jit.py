"""What numba compiles: where it is installed, and what it keeps on the disk."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

log = logging.getLogger(__name__)


@cache
def has_numba() -> bool:
    """Return whether numba is installed and compiles: the extra `jit`."""
    if importlib.util.find_spec("numba") is None:
        return False
    import numba

    return not numba.config.DISABLE_JIT


def compiled(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `make` compiles, from the disk if it was compiled before; without a folder to write to, compiled anew."""
    try:
        return make(*args, **options, cache=True)
    except (RuntimeError, OSError) as error:
        log.info("compiled functions are not kept: %s", error)
        return make(*args, **options, cache=False)
