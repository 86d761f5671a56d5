"""Memory in use and its peak."""

from __future__ import annotations

import torch
from slime_bench.memory_in_use import bytes_in_use, peak_bytes


def test_peak_of_memory_is_that_of_a_tensor_that_is_gone():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = bytes_in_use(device)
    assert before is not None, "this system does not tell; wanted Linux, or CUDA"
    tensor = torch.ones(25_000_000, device=device)
    size = tensor.nbytes
    del tensor
    peak = peak_bytes(device)
    assert peak is not None
    assert size * 0.99 < peak - before < size * 1.2
    after = bytes_in_use(device)
    assert after is not None
    assert abs(after - before) < size * 0.1
