"""Skeletons of generated problems, in which a response is one expression, and right answers to imitate."""

from __future__ import annotations

from slime_core.errors import DataError

from slime_kernels.problems.problem import ANSWER, KernelProblem, filled
from slime_kernels.problems.templates import FAMILIES, family_of

_SKELETON = """\
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def kernel({pointers}, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
{loads}
    tl.store(out_ptr + at, {answer}, mask=at < n)


class ModelNew(nn.Module):
    def forward(self, {arguments}):
        out = torch.empty_like(x)
        n = x.numel()
        kernel[(triton.cdiv(n, 1024),)]({arguments}, out, n, 1024)
        return out
"""


def skeleton_of(problem: KernelProblem) -> str:
    """Return the module `ModelNew` of a generated problem, without the expression that its kernel stores.

    Raises:
        DataError: its family has none.
    """
    family, _ = family_of(problem)
    if not family.answers:
        known = ", ".join(name for name, one in FAMILIES.items() if one.answers)
        raise DataError(
            f"{problem.title}: its family has no skeleton; set kernels.families to some of {known}, or kernels.answer to module"
        )
    arguments = family.arguments
    names = arguments.split(", ")
    return _SKELETON.format(
        pointers=", ".join(f"{name}_ptr" for name in names),
        loads="\n".join(f"    {name} = tl.load({name}_ptr + at, mask=at < n)" for name in names),
        arguments=arguments,
        answer=ANSWER,
    )


def example_of(problem: KernelProblem) -> str | None:
    """Return a right response to a generated problem: the expression where it has a skeleton, or else the module in a fence.

    None where its family has no examples.
    """
    family, variant = family_of(problem)
    if not family.answers:
        return None
    answer = family.answers[variant]
    return answer if problem.skeleton else f"```python\n{filled(skeleton_of(problem), answer)}```"
