"""`can_launch`: where kernels of Triton are taken."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from functools import cache

import torch

log = logging.getLogger(__name__)


def can_launch(device: torch.device) -> bool:
    """Return whether a device is a GPU, for which there is Triton, and the C compiler with which it builds what launches a kernel."""
    return device.type == "cuda" and _is_complete()


@cache
def _is_complete() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if c_compiler() is None:
        log.warning(
            "found no C compiler (CC, or gcc or clang in PATH), which Triton needs: its kernels are not used, and training and decoding are slower"
        )
        return False
    return True


def c_compiler() -> str | None:
    """Return the C compiler that Triton takes: `CC`, or gcc or clang of `PATH`; None where there is none."""
    named = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return next(filter(None, map(shutil.which, named)), None)
