"""`compiled`: a kernel of Triton compiled for a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
