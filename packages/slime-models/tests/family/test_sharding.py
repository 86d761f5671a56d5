from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_core.errors import TrainerError
from slime_models.family.architecture import Architecture
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.rules import Shard
from slime_models.family.sharding import join, split


def architecture(*, groups: int = 2, ffn: int = 4, vocab: int = 8) -> Architecture:
    return Architecture(
        model_type="qwen2",
        num_layers=1,
        hidden_size=3,
        ffn_hidden_size=ffn,
        num_attention_heads=2 * groups,
        num_query_groups=groups,
        head_dim=2,
        vocab_size=vocab,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )


def test_gated_rows_give_each_rank_its_gate_above_its_up() -> None:
    fc1 = torch.tensor([[1], [2], [3], [4], [11], [12], [13], [14]])
    first, second = split(fc1, Shard.GATED_ROWS, 2, architecture())
    assert first.flatten().tolist() == [1, 2, 11, 12]
    assert second.flatten().tolist() == [3, 4, 13, 14]


def test_qkv_rows_give_each_rank_the_qkv_of_its_groups() -> None:
    whole, half = architecture(groups=2), architecture(groups=1)
    shapes = QWEN2.hf_shapes(whole)
    hf = {name: torch.arange(torch.Size(shape).numel()).reshape(shape) for name, shape in shapes.items()}
    attention = "model.layers.0.self_attn."
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    parts = split(QWEN2.to_megatron_tensor(name, hf, whole), QWEN2.weight(name, whole).rule.shard, 2, whole)
    for rank, part in enumerate(parts):
        mine = {
            attention + f"{kind}_proj.weight": hf[attention + f"{kind}_proj.weight"].chunk(2)[rank]
            for kind in "qkv"
        }
        assert torch.equal(part, QWEN2.to_megatron_tensor(name, mine, half))


@settings(max_examples=30)
@given(size=st.sampled_from([1, 2, 4]), scale=st.integers(1, 3))
def test_every_tensor_joins_to_what_was_split(size: int, scale: int) -> None:
    model = architecture(groups=4 * scale, ffn=4 * scale, vocab=7).with_padded_vocab(4)
    for name, shape in QWEN2.megatron_shapes(model).items():
        tensor, shard = torch.randn(shape), QWEN2.weight(name, model).rule.shard
        parts = split(tensor, shard, size, model)
        assert len(parts) == size
        assert torch.equal(join(parts, shard), tensor)
        assert shard is Shard.NONE or parts[0].numel() * size == tensor.numel()


def test_a_cut_through_a_query_group_is_refused() -> None:
    model = architecture(groups=2)
    with pytest.raises(TrainerError, match="2 query groups cannot be cut for 4"):
        split(torch.zeros(model.qkv_size, 3), Shard.QKV_ROWS, 4, model)
