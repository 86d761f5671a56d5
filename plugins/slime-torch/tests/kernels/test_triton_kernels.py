"""Kernels of Triton: in its interpreter where there is no GPU, which it has to be told before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from slime_torch.kernels import triton_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Of a multiprocessor's shared memory, what a program may have on an A100; on an H100 it is more.
SHARED_BYTES = 163 * 1024


def compiled(kernel, pointers, numbers, constants, capability, **options):
    """Compile a kernel for a GPU of this compute capability, which need not be here."""
    types = dict.fromkeys(constants, "constexpr") | numbers
    types |= {name: f"*{kind}" for kind, names in pointers.items() for name in names if name not in constants}
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


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
    parts = "fp32" if splits > 1 else kind
    pointers = {kind: ["heads", "cache", "out", "sinks"], "i64": ["positions", "pages"]}
    pointers[parts] = [*pointers.get(parts, []), "parts", "part_sums"]
    numbers = {"n_pages": "i32", "pages_stride": "i32", "scale": "fp32"}
    made = compiled(
        triton_kernels.attend_kernel, pointers, numbers, constants, capability, num_warps=4, num_stages=2
    )
    assert 0 < made.metadata.shared <= SHARED_BYTES


def test_kernels_of_triton_compute_what_operators_of_pytorch_do():
    where = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "triton_cases.py"]
    done = subprocess.run(
        words, cwd=Path(__file__).parent, env=os.environ | where, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
