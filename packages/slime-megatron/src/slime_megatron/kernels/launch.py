"""`has_kernels`: where kernels of Triton are taken."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def has_kernels(device: torch.device) -> bool:
    """Return whether a device is a GPU for which there is Triton, which compiles kernels for them."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
