"""Kernels of Triton: in its interpreter where there is no GPU, which it has to be told before it is imported; and compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_megatron.kernels import triton_kernels
from slime_models import swiglu
from slime_models.testing.compiled_kernels import compiled, run_cases


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(capability):
    types = dict.fromkeys(("x", "cosine", "sine", "out", "mixed", "gradient", "logits"), "*bf16")
    types |= dict.fromkeys(
        ("peaks", "sums", "normalisers", "outer", "hits", "entropies", "of_entropies"), "*fp32"
    )
    types |= dict.fromkeys(
        ("token_stride", "head_stride", "table_stride", "n_heads", "width", "n_rows", "row_stride"), "i32"
    )
    types |= {"n_columns": "i32", "n_real": "i32", "targets": "*i64", "temperature": "fp32"}
    head = {"HEADS": 8, "DIM": 144, "ROTATED": 128, "HALF": 64, "REST": 16}
    without = {"WITH_ENTROPY": False, "entropies": None, "of_entropies": None}
    for kernel, constants in (
        (triton_kernels.rotate_kernel, head | {"INTERLEAVED": True, "INVERSE": False}),
        (triton_kernels.rotate_kernel, head | {"INTERLEAVED": False, "INVERSE": True}),
        (swiglu.swiglu_kernel, {"COLUMNS": 1024}),
        (swiglu.swiglu_backward_kernel, {"COLUMNS": 1024}),
        (triton_kernels.vocabulary_sums_kernel, {"WITH_ENTROPY": True, "BLOCK": 2048}),
        (triton_kernels.vocabulary_gradient_kernel, {"WITH_ENTROPY": True, "BLOCK": 4096}),
        (triton_kernels.vocabulary_gradient_kernel, without | {"BLOCK": 4096}),
    ):
        # Of a multiprocessor's shared memory a program may have so much on an A100.
        assert compiled(kernel, types, constants, capability=capability, num_warps=4) <= 163 * 1024


def test_kernels_of_triton_compute_what_operators_of_pytorch_do():
    run_cases(Path(__file__).with_name("triton_cases.py"))
