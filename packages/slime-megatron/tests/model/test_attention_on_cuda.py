"""Attention of packed sequences over tensors of the device cuda that have no data: needs no GPU, and computes nothing.

A tensor on another device, or a value that the host asks for, is an error there. Prompts that are shared are left out: torch's bias
for them, which chooses among flash attention and memory-efficient attention itself, cannot be made without data. So is the backward pass, for which torch's autograd wants a real device.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

GROUPS = {
    "one sequence": [(7, ())],
    "sequences of several lengths": [(90, ()), (80, ()), (30, ()), (3, ())],
}


class Calls(TorchFunctionMode):
    """Takes down which kernels each call of `scaled_dot_product_attention` may use."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            cuda = torch.backends.cuda
            allowed = {
                "flash": cuda.flash_sdp_enabled(),
                "efficient": cuda.mem_efficient_sdp_enabled(),
                "plain": cuda.math_sdp_enabled(),
                "cudnn": cuda.cudnn_sdp_enabled(),
            }
            self.kernels.append({name for name, is_allowed in allowed.items() if is_allowed})
        return func(*args, **(kwargs or {}))


def on_cuda(value):
    """Return a tensor, or a dataclass with its tensors, of the device cuda and without data; other values as they are."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    if dataclasses.is_dataclass(value):
        fields = {field.name: on_cuda(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("name", GROUPS)
def test_it_stays_on_the_device_and_uses_no_kernel_that_plans_for_a_shape(name, kv_heads, dtype):
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.prompt_groups import PromptGroup
    from slime_megatron.model.attention import PackedAttention

    packed = pack(
        [PromptGroup(*group) for group in GROUPS[name]],
        (torch.zeros(130, 8, dtype=dtype), torch.zeros(130, 8, dtype=dtype)),
    )
    attention = PackedAttention(SimpleNamespace(attention_dropout=0.0, window_size=None))
    with FakeTensorMode(), Calls() as calls:
        given = on_cuda(packed)
        q, k, v = (
            torch.empty(packed.n_tokens, heads, 8, dtype=dtype, device="cuda")
            for heads in (6, kv_heads, kv_heads)
        )
        found = attention(q, k, v, None, packed_seq_params=given)
    assert (found.device.type, found.dtype, found.shape) == ("cuda", dtype, (packed.n_tokens, 48))
    assert len(calls.kernels) == len(packed.batches)
    assert all(kernels == {"flash", "efficient", "plain"} for kernels in calls.kernels)
    assert torch.backends.cuda.cudnn_sdp_enabled()
