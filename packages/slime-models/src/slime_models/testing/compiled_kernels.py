"""Kernels of Triton where no GPU need be: `compiled` for one, and `run_cases`, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CASES_S = 300


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], *, capability: int, **options: int
) -> int:
    """Compile a kernel, and return the bytes of shared memory that a program of it takes.

    Args:
        kernel: decorated with `triton.jit`.
        types: of the parameters that are no constants: `*bf16`, `*fp32`, `*i64`, `i32`, `fp32`.
        constants: values of the others.
        capability: of the GPU, 80 for an A100, 90 for an H100.
        options: `num_warps`, `num_stages`.

    Raises:
        triton.CompilationError: it is no kernel for this GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared: int = made.metadata.shared
    return shared


def run_cases(file: Path) -> None:
    """Run the tests of a file in a process of its own: where there is no GPU in Triton's interpreter, which it has to be told before it is
    imported.

    Raises:
        AssertionError: a test failed, or there is none; with what pytest printed.
    """
    import torch

    where = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", file.name]
    done = subprocess.run(
        words, cwd=file.parent, env=os.environ | where, capture_output=True, text=True, timeout=_CASES_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
