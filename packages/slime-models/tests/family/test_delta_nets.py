"""What the families with gated delta nets read, and what they leave to others."""

from __future__ import annotations

import pytest
import torch
from slime_core.errors import CheckpointError, DataError
from slime_models.family.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from slime_models.family.families.qwen3_next import QWEN3_NEXT

from ..conftest import tiny_config

#: Of Qwen/Qwen3-Next-80B-A3B-Instruct.
NEXT_80B = {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_published_file_is_read():
    found = QWEN3_NEXT.architecture(NEXT_80B)
    assert found.full_layers == tuple(range(3, 48, 4))
    assert (found.rotary_dim, found.rope_theta, found.moe_norm_topk_prob) == (64, 1e7, True)
    # 2,048 queries and keys each, 4,096 values, as many gates, 32 betas and decays each
    assert (found.linear_qkv_size, found.linear_in_size) == (8192, 8192 + 4096 + 64)
    assert found.tensor_parts["key heads of linear attention"] == 16
    # Without embedding and output layer 80 billion numbers less 2 x 151,936 x 2,048, of which MTP layers are none.
    numbers = sum(torch.Size(shape).numel() for shape in QWEN3_NEXT.hf_shapes(found).values())
    assert numbers == pytest.approx(79.7e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["linear_attention", "mamba"]},
            r"layer_types\[1\]: found 'mamba'; wanted 'linear_att",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types: found .*; wanted a list of num_hidden_layers, 2"),
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads: found 5; wanted a multiple of linear_num_key",
        ),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: found 0; wanted a whole number"),
        ({"attn_output_gate": False}, "attn_output_gate: found False; wanted True"),
        ({"attention_bias": True}, "attention_bias: found True; wanted False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: found 'bfloat16'; wanted 'float32'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: found 'sigmoid'; wanted 'swish' or 'silu'"),
        (
            {"rope_parameters": {"rope_type": "yarn"}, "partial_rotary_factor": None},
            "rope_type: found 'yarn'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'; wanted 'silu'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_field(changes, message):
    for family in (QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT):
        with pytest.raises(DataError, match=f"config.json: .*{message}|config.json.*{message}"):
            family.architecture(tiny_config(family.model_type) | changes)


@pytest.mark.parametrize("gate", ["swish", "silu", None])
def test_gates_of_a_delta_net_are_those_of_files_that_do_not_say(gate):
    config = tiny_config("qwen3_5_text")
    assert QWEN3_5_TEXT.architecture(config | {"output_gate_type": gate}) == QWEN3_5_TEXT.architecture(config)


def test_the_text_model_inside_of_a_folder_is_read_and_named():
    config = tiny_config("qwen3_5", tie_word_embeddings=True)
    inner = config["text_config"]
    assert QWEN3_5.architecture(config).tie_word_embeddings
    with pytest.raises(DataError, match=r"config.json: text_config: hidden_size: found None"):
        QWEN3_5.architecture(config | {"text_config": {**inner, "hidden_size": None}})
    with pytest.raises(
        DataError, match=r"config.json: text_config: found None; wanted a table: the text model"
    ):
        QWEN3_5.architecture({"model_type": "qwen3_5"})
    with pytest.raises(
        DataError, match=r"tie_word_embeddings: found False; wanted what text_config says, True"
    ):
        QWEN3_5.architecture(config | {"tie_word_embeddings": False})
    with pytest.raises(DataError, match="norm_topk_prob: found False; wanted True"):
        QWEN3_5_MOE_TEXT.architecture(tiny_config("qwen3_5_moe_text", norm_topk_prob=False))


def test_mtp_layers_and_vision_towers_are_passed_on_and_nothing_else_is():
    config = tiny_config("qwen3_5", tie_word_embeddings=False)
    architecture = QWEN3_5.architecture(config)
    hf = {name: torch.zeros(shape) for name, shape in QWEN3_5.hf_shapes(architecture).items()}
    others = {"mtp.fc.weight": torch.ones(2), "model.visual.pos_embed.weight": torch.ones(3)}
    QWEN3_5.check_names(hf | others, architecture)
    assert dict(QWEN3_5.passed_on(hf | others, architecture)) == {name: others[name] for name in others}
    assert not QWEN3_5.has_mtp(hf | others, architecture)
    fused = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=f"{fused} unknown"):
        QWEN3_5.check_names(hf | {fused: torch.ones(1)}, architecture)


def test_a_misshapen_projection_is_told_by_the_fields_that_say_otherwise():
    config = tiny_config("qwen3_next", tie_word_embeddings=False)
    architecture = QWEN3_NEXT.architecture(config)
    hf = {name: torch.zeros(shape) for name, shape in QWEN3_NEXT.hf_shapes(architecture).items()}
    hf["model.layers.0.linear_attn.in_proj_ba.weight"] = torch.zeros(4, 20)
    with pytest.raises(
        CheckpointError, match=r"found shape \(4, 20\); wanted \(12, 20\).* 2 x linear_num_value_heads"
    ):
        QWEN3_NEXT.check_weights(hf, architecture)
