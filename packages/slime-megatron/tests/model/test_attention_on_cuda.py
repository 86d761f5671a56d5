"""Attention of packed sequences over tensors of the device cuda that have no data: needs no GPU, and computes nothing.

A tensor on another device, or a value that the host asks for, is an error there. Prompts that are shared are left out: torch's bias
for them, which chooses among flash attention and memory-efficient attention itself, cannot be made without data. So is the backward pass, for which torch's autograd wants a real device.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from slime_models.testing.cuda_without_device import cuda_without_device, on_cuda

GROUPS = {
    "one sequence": [(7, ())],
    "sequences of several lengths": [(90, ()), (80, ()), (30, ()), (3, ())],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("name", GROUPS)
def test_it_stays_on_the_device_and_uses_no_kernel_that_plans_for_a_shape(name, kv_heads, dtype):
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.trees.token_tree import TokenTree
    from slime_megatron.model.layers.attention import PackedAttention

    packed = pack(
        [TokenTree.of_prompt(*group) for group in GROUPS[name]],
        (torch.zeros(130, 8, dtype=dtype), torch.zeros(130, 8, dtype=dtype)),
    )
    attention = PackedAttention(
        SimpleNamespace(attention_dropout=0.0, window_size=None, rotary_interleaved=False)
    )
    with cuda_without_device() as counted:
        given = on_cuda(packed)
        q, k, v = (
            torch.empty(packed.n_tokens, heads, 8, dtype=dtype, device="cuda")
            for heads in (6, kv_heads, kv_heads)
        )
        found = attention(q, k, v, None, packed_seq_params=given)
    assert (found.device.type, found.dtype, found.shape) == ("cuda", dtype, (packed.n_tokens, 48))
    assert counted.attention == len(packed.batches) * [{"flash", "efficient", "plain"}]
    assert not counted.waits
    assert torch.backends.cuda.cudnn_sdp_enabled()
