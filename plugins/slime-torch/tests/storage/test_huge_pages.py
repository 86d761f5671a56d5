import contextlib
import mmap

import torch
from slime_torch.storage.huge_pages import collapse
from slime_torch.storage.weights import Fused, can_pack


def huge_bytes(address):
    """Return how much of the mapping at an address lies in huge pages, as the kernel counts it."""
    is_it = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if not first.endswith(":"):  # "from-to flags ...", before the figures of a mapping
                begin, end = (int(number, 16) for number in first.split("-"))
                is_it = begin <= address < end
            elif is_it and first == "AnonHugePages:":
                return int(line.split()[1]) << 10
    raise AssertionError("no mapping is there")


def test_what_is_collapsed_is_unchanged_and_in_as_many_huge_pages_as_said():
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel that has no huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # one that gives them out unasked
        values = torch.frombuffer(memory, dtype=torch.int64).copy_(torch.arange(4 << 20))
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        pages = collapse(values.data_ptr(), values.nbytes)
        assert huge_bytes(values.data_ptr()) == pages * (2 << 20)
        assert torch.equal(values, torch.arange(4 << 20))
        del values  # the mapping cannot be closed before


def test_memory_that_is_not_there_is_left_alone():
    assert collapse(0, 4 << 20) == 0


def test_packed_weights_multiply_as_plain_ones_after_each_write():
    dtype, device = torch.bfloat16, torch.device("cpu")
    fused = Fused({"w": (3072, 576)}, dtype=dtype, device=device, packed=can_pack(dtype, device))
    x = torch.randn(64, 576).bfloat16()
    for seed in range(3):
        weight = torch.randn(3072, 576, generator=torch.Generator().manual_seed(seed)).bfloat16()
        fused.write({"w": weight})
        torch.testing.assert_close(fused.linear(x), torch.nn.functional.linear(x, weight))
        assert torch.equal(fused.read()["w"], weight)
