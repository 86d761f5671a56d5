"""Copying arrays of the host to a device without waiting for what the device computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor of a device. On a CPU both share their memory, unless the array is read-only: it is copied.

    On CUDA the array may be changed or freed as soon as this returns: memory that is not pinned is put into a buffer of the
    driver first, and the copy from there comes in the stream's order. A plain `tensor.to(device)`, or `torch.tensor(...,
    device=device)`, waits until all that was launched before it is done.

    Source: CUDA Runtime API, "API synchronization behavior", memcpy, asynchronous.
    """
    return torch.from_numpy(np.require(values, requirements="W")).to(device, non_blocking=True)
