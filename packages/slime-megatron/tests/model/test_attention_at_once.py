"""Attention by one call of variable lengths against padded batches: CUDA's kernel, or on a CPU a slow loop in its place."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from slime_models.testing.cuda_without_device import cuda_without_device, on_cuda
from slime_models.testing.variable_lengths import looped
from torch.nn.attention import varlen

from ..host_copies import on_host

GROUPS = {
    "one": [(7, ())],
    "several lengths": [(90, ()), (80, ()), (3, ()), (5, (4,))],
    "shared prompts": [(9, (4, 6, 1)), (30, ()), (5, (7, 7, 0)), (2, (0, 3))],
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", GROUPS)
def test_it_is_attention_of_padded_batches_and_so_are_its_gradients(name, window):
    """Padded batches are attended to on the CPU, which computes them in float32; the bound is eight roundings to bfloat16 of the largest."""
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.trees.segments import row_segments
    from slime_megatron.batch.trees.token_tree import TokenTree
    from slime_megatron.batch.variable_lengths import VariableLengths
    from slime_megatron.model.layers.attention import PackedAttention
    from slime_megatron.parallel.process_groups import device

    groups = [TokenTree.of_prompt(*group) for group in GROUPS[name]]
    angles = torch.arange(130)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03, 1.0, 0.3, 0.1, 0.03])
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    padded = pack(groups, tables)
    assert padded.lengths is None
    at_once = dataclasses.replace(
        pack(groups, tuple(table.to(device()) for table in tables)),
        lengths=VariableLengths.of(row_segments(groups), device()),
    )
    config = SimpleNamespace(attention_dropout=0.0, window_size=None, rotary_interleaved=False)
    attention = PackedAttention(config, 0.4, window=window)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(padded.n_tokens, heads, 8, generator=generator).bfloat16() for heads in (6, 2, 2)]
    gradient = torch.randn(padded.n_tokens, 48, generator=generator).bfloat16()
    found = []
    for row in (padded, at_once):
        given = [x.to(row.cos.device, copy=True).requires_grad_() for x in drawn]
        with kernel_of(device()):
            output = attention(*given, None, packed_seq_params=row)
        output.backward(gradient.to(output.device))
        found.append(on_host([output, *(x.grad for x in given)]))
    wanted, mine = found
    for one, other in zip(mine, wanted, strict=True):
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()


def kernel_of(device):
    """Put the loop in the place of torch's kernel, unless that is there."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    return mock.patch.object(varlen, "varlen_attn", looped)


@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("name", GROUPS)
def test_a_layer_makes_one_call_on_the_device_and_waits_for_nothing(name, kv_heads):
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.trees.token_tree import TokenTree
    from slime_megatron.model.layers.attention import PackedAttention

    attention = PackedAttention(
        SimpleNamespace(attention_dropout=0.0, window_size=None, rotary_interleaved=False)
    )
    with cuda_without_device() as counted:
        tables = on_cuda(torch.empty(130, 8, dtype=torch.bfloat16))
        packed = pack([TokenTree.of_prompt(*group) for group in GROUPS[name]], (tables, tables))
        # Positions and ends; where each token is in padded batches; ends of queries, and of keys and which they are.
        assert counted.operations.count("_to_copy") == 2 + 2 * (name != "one") + {"shared prompts": 3}.get(
            name, 1
        )
        q, k, v = (
            torch.empty(packed.n_tokens, heads, 8, dtype=torch.bfloat16, device="cuda")
            for heads in (6, kv_heads, kv_heads)
        )
        before = len(counted.operations)
        found = attention(q, k, v, None, packed_seq_params=packed)
    assert (found.device.type, found.dtype, found.shape) == ("cuda", torch.bfloat16, (packed.n_tokens, 48))
    assert counted.attention == [] and not counted.waits
    launched = counted.operations[before:]
    assert [each for each in launched if "attn" in each] == ["torch_attn::_varlen_attn"]
    copies = 2 if name == "shared prompts" else 0
    # Rotary embedding of queries and keys, the call, copies of shared prompts.
    assert len(launched) == 2 + 1 + copies


def test_sinks_which_its_kernel_does_not_know_are_computed_all_the_same():
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.trees.segments import row_segments
    from slime_megatron.batch.trees.token_tree import TokenTree
    from slime_megatron.batch.variable_lengths import VariableLengths
    from slime_megatron.families.gpt_oss import SinkAttention

    groups = [TokenTree.of_prompt(*group) for group in GROUPS["shared prompts"]]
    ones = torch.ones(40, 8)
    packed = pack(groups, (ones.bfloat16(), torch.zeros(40, 8).bfloat16()))
    at_once = dataclasses.replace(
        packed, lengths=VariableLengths.of(row_segments(groups), torch.device("cpu"))
    )
    config = SimpleNamespace(
        attention_dropout=0.0,
        window_size=None,
        rotary_interleaved=False,
        num_attention_heads=6,
        tensor_model_parallel_size=1,
        params_dtype=torch.bfloat16,
    )
    attention = SinkAttention(config, 0.4)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(packed.n_tokens, heads, 8, generator=generator).bfloat16() for heads in (6, 2, 2)]
    with torch.no_grad(), mock.patch.object(varlen, "varlen_attn", looped):
        attention.sinks.fill_(2.0)
        wanted, found = (attention(*drawn, None, packed_seq_params=row) for row in (packed, at_once))
        first = (
            drawn[2][0].repeat_interleave(3, 0).float()
        )  # of its sequence's first token there is one value, and the sink
        scores = (drawn[0][0].float() * drawn[1][0].repeat_interleave(3, 0).float()).sum(-1) * 0.4
    assert torch.equal(found, wanted)
    by_hand = (first * torch.sigmoid(scores - 2.0)[:, None]).flatten()
    assert torch.allclose(found[0].float(), by_hand, atol=2**-6)
