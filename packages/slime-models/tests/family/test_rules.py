from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_core.errors import CheckpointError, WeightSyncError
from slime_models.family.architecture import Architecture
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.latent_attention.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.family import ModelFamily
from slime_models.family.rules import GATED, QKV, VOCAB
from slime_models.hf.folder import HfCheckpoint
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ..conftest import FAMILIES, tiny_config


def hf_tensors(family: ModelFamily, architecture: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in family.hf_shapes(architecture).items()
    }


def assert_round_trip(family: ModelFamily, architecture: Architecture) -> None:
    hf = hf_tensors(family, architecture)
    back: dict[str, Tensor] = {}
    megatron = dict(family.to_megatron(hf, architecture))
    assert {n: tuple(tensor.shape) for n, tensor in megatron.items()} == family.megatron_shapes(architecture)
    for name, tensor in family.hf_tensors(megatron.items(), architecture):
        assert name not in back
        back[name] = tensor
    assert back.keys() == hf.keys()
    assert all(torch.equal(back[name], hf[name]) for name in hf)


def test_table_lists_exactly_the_tensors_that_transformers_saves(
    family: ModelFamily, config: dict[str, Any], tmp_path: Path
) -> None:
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    known = config | (
        {"model_type": "deepseek_v3"} if family is KIMI_K2 else {}
    )  # whose class its folders name
    kind.from_config(AutoConfig.for_model(**known)).save_pretrained(tmp_path)
    saved, architecture = HfCheckpoint(tmp_path), family.architecture(config)
    left = family.left_over(saved, architecture)
    assert all(name.startswith("model.visual.") for name in left) and bool(left) == (
        "vision_config" in config
    )
    wanted = {name: tuple(saved[name].shape) for name in saved if name not in left}
    assert family.hf_shapes(architecture) == wanted


def test_there_and_back_is_bit_exact(family: ModelFamily, config: dict[str, Any]) -> None:
    assert_round_trip(family, family.architecture(config))


@settings(max_examples=40)
@given(
    family=st.sampled_from([LLAMA, QWEN2, QWEN3, QWEN3_MOE]),
    experts=st.integers(1, 4),
    layers=st.integers(1, 3),
    groups=st.integers(1, 4),
    heads_per_group=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    hidden=st.integers(1, 9),
    ffn=st.integers(1, 9),
    vocab=st.integers(1, 40),
    multiple=st.sampled_from([1, 8, 128]),
    tied=st.booleans(),
)
def test_any_shape_goes_there_and_back(
    family: ModelFamily,
    layers: int,
    groups: int,
    heads_per_group: int,
    head_dim: int,
    hidden: int,
    ffn: int,
    vocab: int,
    multiple: int,
    tied: bool,
    experts: int,
) -> None:
    architecture = Architecture(
        model_type=family.model_type,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_moe_experts=experts,
        moe_ffn_hidden_size=ffn + 1,
        num_attention_heads=groups * heads_per_group,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=vocab,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    assert_round_trip(family, architecture.with_padded_vocab(multiple))


@pytest.fixture
def six_heads() -> Architecture:
    """6 query heads in 2 groups; heads are 1 wide, so that a row is a head."""
    return Architecture(
        model_type="llama",
        num_layers=1,
        hidden_size=1,
        ffn_hidden_size=2,
        num_attention_heads=6,
        num_query_groups=2,
        head_dim=1,
        vocab_size=3,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )


def test_qkv_holds_per_group_its_queries_then_key_then_value(six_heads: Architecture) -> None:
    query = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]])
    key, value = torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])
    fused = QKV.pack([query, key, value], six_heads)
    assert fused.flatten().tolist() == [0, 1, 2, 10, 20, 3, 4, 5, 11, 21]


def test_qkv_keeps_the_rows_of_a_head_together(six_heads: Architecture) -> None:
    two_wide = dataclasses.replace(six_heads, num_attention_heads=2, head_dim=2)
    bias = QKV.pack([torch.arange(4), torch.arange(10, 14), torch.arange(20, 24)], two_wide)
    assert bias.tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]


def test_gate_stands_above_up(six_heads: Architecture) -> None:
    assert GATED.pack([torch.tensor([[1], [2]]), torch.tensor([[3], [4]])], six_heads).tolist() == [
        [1],
        [2],
        [3],
        [4],
    ]


def test_vocabulary_is_padded_with_rows_of_zeros(six_heads: Architecture) -> None:
    padded = six_heads.with_padded_vocab(4)
    assert VOCAB.pack([torch.tensor([[7], [8], [9]])], padded).tolist() == [[7], [8], [9], [0]]
    assert padded.with_padded_vocab(3).padded_vocab_size == 3


def test_tensors_of_one_part_are_not_copied(six_heads: Architecture) -> None:
    hf = hf_tensors(LLAMA, six_heads)
    megatron = dict(LLAMA.to_megatron(hf, six_heads))
    norm = "decoder.final_layernorm.weight"
    assert megatron[norm].data_ptr() == hf["model.norm.weight"].data_ptr()
    gate, up = LLAMA.to_hf(
        "decoder.layers.0.mlp.linear_fc1.weight",
        megatron["decoder.layers.0.mlp.linear_fc1.weight"],
        six_heads,
    )
    assert gate[1].data_ptr() == megatron["decoder.layers.0.mlp.linear_fc1.weight"].data_ptr()
    assert up[0] == "model.layers.0.mlp.up_proj.weight"


def test_tensors_are_read_one_weight_at_a_time(six_heads: Architecture) -> None:
    read: list[str] = []

    class Recorder(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    stream = LLAMA.to_megatron(Recorder(hf_tensors(LLAMA, six_heads)), six_heads)
    next(stream)
    assert read == ["model.embed_tokens.weight"]


def test_megatron_names_are_those_of_the_local_spec(six_heads: Architecture) -> None:
    layer = "decoder.layers.0."
    assert LLAMA.megatron_names(six_heads) == (
        "embedding.word_embeddings.weight",
        layer + "input_layernorm.weight",
        layer + "self_attention.linear_qkv.weight",
        layer + "self_attention.linear_proj.weight",
        layer + "pre_mlp_layernorm.weight",
        layer + "mlp.linear_fc1.weight",
        layer + "mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
    )


def test_experts_stand_after_their_router_one_by_one() -> None:
    architecture = QWEN3_MOE.architecture(tiny_config("qwen3_moe", num_hidden_layers=1, num_experts=2))
    mlp = "decoder.layers.0.mlp."
    names = QWEN3_MOE.megatron_names(architecture)
    assert names[names.index(mlp + "router.weight") :] == (
        mlp + "router.weight",
        mlp + "experts.local_experts.0.linear_fc1.weight",
        mlp + "experts.local_experts.0.linear_fc2.weight",
        mlp + "experts.local_experts.1.linear_fc1.weight",
        mlp + "experts.local_experts.1.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    )
    numbers = [QWEN3_MOE.weight(name, architecture).expert for name in names[-7:-2]]
    assert numbers == [None, 0, 0, 1, 1]


def test_one_tensor_is_the_same_as_in_the_stream(six_heads: Architecture) -> None:
    hf = hf_tensors(LLAMA, six_heads)
    for name, tensor in LLAMA.to_megatron(hf, six_heads):
        assert torch.equal(LLAMA.to_megatron_tensor(name, hf, six_heads), tensor)


def test_missing_and_unknown_tensors_are_named(six_heads: Architecture) -> None:
    hf = hf_tensors(LLAMA, six_heads)
    hf["model.layers.0.self_attn.o_proj.bias"] = hf.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight missing; .*o_proj\.bias unknown"):
        next(LLAMA.to_megatron(hf, six_heads))


def test_left_over_tensors_that_nobody_needs_are_passed_over(six_heads: Architecture) -> None:
    hf = hf_tensors(LLAMA, six_heads)
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"]
    hf["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)
    assert len(list(LLAMA.to_megatron(hf, six_heads))) == 8


@pytest.mark.parametrize("family", [DEEPSEEK_V3, KIMI_K2])
def test_tables_of_angles_in_published_folders_are_passed_over(family):
    """As in those of Moonlight and Kimi-K2."""
    architecture = family.architecture(tiny_config("deepseek_v3") | {"model_type": family.model_type})
    hf = {name: torch.zeros(shape) for name, shape in family.hf_shapes(architecture).items()}
    hf["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    family.check_weights(hf, architecture)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(six_heads: Architecture) -> None:
    hf = hf_tensors(LLAMA, six_heads) | {"model.embed_tokens.weight": torch.zeros(5, 1)}
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.*\(5, 1\); wanted \(3, 1\), by config\.json: vocab_size = 3"
    ):
        next(LLAMA.to_megatron(hf, six_heads))


def test_unknown_megatron_names_and_shards_are_refused(six_heads: Architecture) -> None:
    with pytest.raises(WeightSyncError, match=r"decoder\.layers\.1\..* of 1 layers with tied embeddings"):
        next(LLAMA.to_hf("decoder.layers.1.input_layernorm.weight", torch.zeros(1), six_heads))
    with pytest.raises(WeightSyncError, match=r"found shape \(2, 1\); wanted \(4, 1\)"):
        next(LLAMA.to_hf("decoder.layers.0.mlp.linear_fc1.weight", torch.zeros(2, 1), six_heads))


def test_tables_hooks_and_fetch_import_without_torch() -> None:
    modules = "slime_models.hooks, slime_models.hf.fetch, slime_models.family.families.llama, slime_models.family.families.qwen3"
    code = (
        f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("model_type", "field", "value", "message"),
    [
        (
            "qwen3", "num_attention_heads", 8,
            r"q_proj\.weight: found shape \(24, 20\); wanted \(48, 20\), by config\.json: "
            r"num_attention_heads x head_dim = 48$",
        ),
        ("llama", "num_key_value_heads", 4, r"k_proj\.weight: .* by config\.json: num_key_value_heads x head_dim = 24$"),
        ("llama", "head_dim", 8, r"q_proj\.weight: .* by config\.json: num_attention_heads x head_dim = 32$"),
        ("qwen2", "hidden_size", 24, r"embed_tokens\.weight: .* by config\.json: hidden_size = 24$"),
        ("qwen3", "vocab_size", 40, r"embed_tokens\.weight: .* by config\.json: vocab_size = 40$"),
        ("qwen2", "intermediate_size", 30, r"gate_proj\.weight: .* by config\.json: intermediate_size = 30$"),
        ("qwen3_moe", "moe_intermediate_size", 12, r"gate_proj\.weight: .* by config\.json: moe_intermediate_size = 12$"),
        ("qwen3_moe", "num_experts", 4, r"experts\.3\..* missing"),
        ("llama", "num_hidden_layers", 3, r"model\.layers\.2\..* missing; wanted .* of 3 layers \(num_hidden_layers\)"),
        ("llama", "num_hidden_layers", 1, r"model\.layers\.1\..* unknown; wanted .* of 1 layers \(num_hidden_layers\)"),
    ],
)  # fmt: skip
def test_weights_that_config_json_does_not_describe_are_refused_by_its_field(
    model_type, field, value, message
):
    family = FAMILIES[model_type]
    config = tiny_config(model_type, tie_word_embeddings=True)
    shapes = family.hf_shapes(family.architecture(config))
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    family.check_weights(weights, family.architecture(config))
    with pytest.raises(CheckpointError, match=message):
        family.check_weights(weights, family.architecture(config | {field: value}))


def test_tied_embeddings_are_held_against_the_weights(family):
    tied, untied = (
        family.architecture(tiny_config(family.model_type, tie_word_embeddings=tie)) for tie in (True, False)
    )
    weights = {name: torch.zeros(shape) for name, shape in family.hf_shapes(tied).items()}
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings: found false, and the weights have no lm_head"
    ):
        family.check_weights(weights, untied)
    weights["lm_head.weight"] = torch.zeros(37, 20)
    family.check_weights(weights, tied)  # a copy of the embedding does no harm
    family.check_weights(weights, untied)
    weights["lm_head.weight"][36, 19] = 1
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings: found true, and lm_head\.weight is not model"
    ):
        family.check_weights(weights, tied)


def test_dense_layers_come_first_and_layers_with_experts_have_a_bias_and_a_shared_one() -> None:
    architecture = GLM4_MOE.architecture(tiny_config("glm4_moe", n_routed_experts=2))
    names = [name.removeprefix("decoder.layers.") for name in GLM4_MOE.megatron_names(architecture)]
    assert [name for name in names if ".mlp." in name] == [
        "0.mlp.linear_fc1.weight",
        "0.mlp.linear_fc2.weight",
        "1.mlp.router.weight",
        "1.mlp.router.expert_bias",
        "1.mlp.shared_experts.linear_fc1.weight",
        "1.mlp.shared_experts.linear_fc2.weight",
        "1.mlp.experts.local_experts.0.linear_fc1.weight",
        "1.mlp.experts.local_experts.0.linear_fc2.weight",
        "1.mlp.experts.local_experts.1.linear_fc1.weight",
        "1.mlp.experts.local_experts.1.linear_fc2.weight",
    ]
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert GLM4_MOE.float32(architecture) == {bias}
    assert "decoder.layers.1.mlp.router.expert_bias" not in GLM4_MOE.parameter_names(architecture)


def test_multi_token_prediction_layers_are_passed_on_and_no_others() -> None:
    config = tiny_config("glm4_moe", num_nextn_predict_layers=1)
    architecture = GLM4_MOE.architecture(config)
    hf = hf_tensors(GLM4_MOE, architecture)
    mtp = {"model.layers.2.eh_proj.weight": torch.zeros(1), "model.layers.2.enorm.weight": torch.ones(1)}
    GLM4_MOE.check_names(hf | mtp, architecture)
    assert dict(GLM4_MOE.passed_on(hf | mtp, architecture)) == mtp
    for others in (
        {"model.layers.3.enorm.weight": torch.zeros(1)},
        {"model.layers.20.enorm.weight": torch.zeros(1)},
    ):
        with pytest.raises(CheckpointError, match=r"enorm\.weight unknown"):
            GLM4_MOE.check_names(hf | others, architecture)
    without = GLM4_MOE.architecture(config | {"num_nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj\.weight, .* unknown"):
        GLM4_MOE.check_names(hf | mtp, without)


def test_layers_that_are_held_go_there_and_back_and_their_copies_follow_the_model() -> None:
    config = tiny_config("glm4_moe", num_nextn_predict_layers=2, tie_word_embeddings=False)
    alone = GLM4_MOE.architecture(config)
    held = alone.with_mtp()
    assert_round_trip(GLM4_MOE, held)
    names = GLM4_MOE.megatron_names(held)
    assert names[: len(GLM4_MOE.megatron_names(alone))] == GLM4_MOE.megatron_names(alone)
    weight = GLM4_MOE.weight("mtp.layers.1.eh_proj.weight", held)
    assert (weight.shape, weight.hf) == ((20, 40), {"model.layers.3.eh_proj.weight": (20, 40)})
    expert = GLM4_MOE.weight(
        "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.2.linear_fc2.weight", held
    )
    assert list(expert.hf) == ["model.layers.2.mlp.experts.2.down_proj.weight"]
    folder = hf_tensors(GLM4_MOE, held)
    assert GLM4_MOE.has_mtp(folder, alone)
    assert not GLM4_MOE.has_mtp(hf_tensors(GLM4_MOE, alone), alone)
    stale = {
        "model.layers.2.embed_tokens.weight": torch.zeros(1),
        "model.layers.3.shared_head.head.weight": torch.ones(1),
    }
    other = {"model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    folder |= stale | other
    GLM4_MOE.check_names(folder, held)
    assert dict(GLM4_MOE.passed_on(folder, held)) == other
    model = {name: folder[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    written = dict(GLM4_MOE.with_copies(model.items(), folder, held))
    assert written.keys() == model.keys() | stale.keys()
    assert written["model.layers.2.embed_tokens.weight"] is model["model.embed_tokens.weight"]
    assert written["model.layers.3.shared_head.head.weight"] is model["lm_head.weight"]
    assert dict(GLM4_MOE.with_copies(model.items(), folder, alone)) == model
