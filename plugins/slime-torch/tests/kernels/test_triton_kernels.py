"""Kernels of Triton: in its interpreter where there is no GPU, which it has to be told before it is imported; and compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_models.testing.compiled_kernels import compiled, run_cases
from slime_torch.kernels import triton_kernels

#: Of a multiprocessor's shared memory, what a program may have on an A100; on an H100 it is more.
SHARED_BYTES = 163 * 1024


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("kind", "dim", "window", "has_sinks", "splits"),
    [("bf16", 128, 0, False, 1), ("bf16", 64, 128, True, 8), ("fp32", 256, 0, False, 4)],
)
def test_attention_compiles_for_gpus_and_fits_their_shared_memory(
    capability, kind, dim, window, has_sinks, splits
):
    constants = {"QUERIES": 16, "GROUPS": 8, "ROWS": 16, "DIM": dim, "WIDTH": dim, "PAGE_LEN": 32}
    constants |= {
        "WINDOW": window,
        "HAS_SINKS": has_sinks,
        "SPLITS": splits,
        "KEYS": 64 if dim <= 128 else 32,
    }
    constants |= {} if has_sinks else {"sinks": None}
    types = dict.fromkeys(("heads", "cache", "out", "sinks"), f"*{kind}")
    types |= dict.fromkeys(("parts", "part_sums"), "*fp32" if splits > 1 else f"*{kind}")
    types |= {"positions": "*i64", "pages": "*i64", "n_pages": "i32", "pages_stride": "i32", "scale": "fp32"}
    shared = compiled(
        triton_kernels.attend_kernel, types, constants, capability=capability, num_warps=4, num_stages=2
    )
    assert 0 < shared <= SHARED_BYTES


@pytest.mark.parametrize("capability", [80, 90])
def test_the_others_compile_for_gpus(capability):
    half, numbers = "*bf16", "*fp32"
    types = dict.fromkeys(("heads", "cosine", "sine", "cache", "out", "logits"), half)
    types |= dict.fromkeys(
        ("query_norm", "key_norm", "parts", "part_sums", "temperatures", "maxima", "sums"), numbers
    )
    types |= dict.fromkeys(("positions", "page", "inside"), "*i64") | {"epsilon": "fp32"}
    types |= dict.fromkeys(("n_pages", "n_columns", "n_blocks"), "i32")
    head = {"QUERIES": 16, "GROUPS": 8, "DIM": 128, "HALF": 64, "PAGE_LEN": 32, "HAS_NORMS": True}
    for kernel, constants in (
        (triton_kernels.place_kernel, head),
        (triton_kernels.place_kernel, head | {"HAS_NORMS": False, "query_norm": None, "key_norm": None}),
        (triton_kernels.combine_kernel, {"DIM": 128, "WIDTH": 128, "SPLITS": 8}),
        (triton_kernels.block_sums_kernel, {"BLOCK": 256, "BLOCKS": 8}),
    ):
        assert compiled(kernel, types, constants, capability=capability, num_warps=4) <= SHARED_BYTES


@pytest.mark.faults
def test_kernels_of_triton_compute_what_operators_of_pytorch_do():
    run_cases(Path(__file__).with_name("triton_cases.py"))
