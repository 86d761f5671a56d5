"""The candidate in a response."""

from __future__ import annotations

from slime_core.rewards.ending import without_special_tokens
from slime_rm.code.fences import python_block

from slime_kernels.problems.problem import filled

_END_OF_THOUGHT = "</think>"


def candidate_of(response: str, skeleton: str = "") -> str | None:
    """Return the last fenced block of Python after the thought, or of no language where there is no such; None without any.

    Args:
        response: what the policy said.
        skeleton: of the problem, where it has one. The block is put into it, or all after the thought where there is no block, up to the
            special tokens at its end (`<|im_end|>`).
    """
    answer = response.rpartition(_END_OF_THOUGHT)[2]
    block = python_block(answer)
    if skeleton and block is None:
        block = without_special_tokens(answer)
    if block is None or not block.strip():
        return None
    return filled(skeleton, block.strip()) if skeleton else block
