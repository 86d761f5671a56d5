"""The kernel of Triton: in its interpreter where there is no GPU, which it has to be told before it is imported; and compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_models.testing.compiled_kernels import compiled, run_cases
from slime_models.transfer.kernels import triton_kernels


@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_gpus(capability: int) -> None:
    types = {"words": "*i64", "word_weights": "*i64", "sums": "*i64", "n_rows": "i32"}
    constants = {"ROWS": 8, "WORDS": 512}
    shared = compiled(triton_kernels.row_sums_kernel, types, constants, capability=capability, num_warps=4)
    assert shared <= 48 * 1024


def test_it_computes_what_operators_of_pytorch_do() -> None:
    run_cases(Path(__file__).with_name("triton_cases.py"))
