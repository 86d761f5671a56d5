"""gpt-oss: experts that folders hold as one tensor, sinks, windows, and what config.json may not say."""

from __future__ import annotations

import math

import pytest
import torch
from slime_core.errors import CheckpointError, DataError
from slime_models.family.families.gpt_oss import GPT_OSS
from slime_models.family.rotary import inverse_frequencies
from slime_models.family.sharding import split
from slime_models.family.yarn import YarnScaling

from ..conftest import tiny_config

#: Of openai/gpt-oss-20b; its weights are MXFP4, which the field that is left out here says.
TWENTY_B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_published_file_is_read():
    read = GPT_OSS.architecture(TWENTY_B)
    assert (read.num_layers, read.query_size, read.key_value_size, read.rope_theta) == (24, 4096, 512, 150e3)
    assert (read.num_moe_experts, read.moe_router_topk, read.moe_ffn_hidden_size) == (32, 4, 2880)
    assert read.sliding_layers == tuple(range(0, 24, 2))
    assert (read.sliding_window, read.swiglu_alpha, read.swiglu_limit) == (128, 1.702, 7.0)
    assert read.rope_scaling == YarnScaling(
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        attention_factor=0.1 * math.log(32) + 1,
        original_max_position_embeddings=4096,
    )
    shapes = GPT_OSS.hf_shapes(read)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (32, 2880, 5760)
    assert sum(map(math.prod, shapes.values())) == 20_914_757_184  # the 20.9 billion of its model card


def test_what_a_file_does_not_say_is_what_transformers_takes_it_to_mean():
    own = ("layer_types", "rope_scaling", "rope_theta", "attention_bias", "sliding_window", "swiglu_limit")
    less = {name: value for name, value in TWENTY_B.items() if name not in own}
    assert GPT_OSS.architecture(less) == GPT_OSS.architecture(TWENTY_B)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "attention_bias: found False; wanted True"),
        ({"layer_types": ["chunked_attention"] * 24}, r"layer_types\[0\]: found 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types: found '1 layers'; wanted num_hidden_layers, 24"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type: found 'linear'; wanted 'default' or 'yarn'"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok: found 33; wanted at most num_local_experts, 32"),
        ({"swiglu_limit": 0}, "swiglu_limit: found 0; wanted a number above 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_field(changes, message):
    with pytest.raises(DataError, match=message):
        GPT_OSS.architecture(TWENTY_B | changes)


@pytest.fixture
def small():
    """Three experts of 2, hidden size 2; element [expert, in, out] of a stack is 100 expert + 10 in + out."""
    sizes = {"hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = tiny_config("gpt_oss", **sizes, num_key_value_heads=1)
    architecture = GPT_OSS.architecture(config)
    hf = {name: torch.zeros(shape) for name, shape in GPT_OSS.hf_shapes(architecture).items()}
    grid = 100 * torch.arange(3)[:, None, None] + 10 * torch.arange(2)[:, None] + torch.arange(4)
    hf["model.layers.0.mlp.experts.gate_up_proj"] = grid
    hf["model.layers.0.mlp.experts.down_proj"] = grid[..., :2]
    hf["model.layers.0.mlp.experts.gate_up_proj_bias"] = grid[:, 0]
    return architecture, hf


def test_gate_and_up_are_columns_by_turns_and_matrices_are_transposed(small):
    architecture, hf = small
    expert = "decoder.layers.0.mlp.experts.local_experts.2."

    def found(name):
        return GPT_OSS.to_megatron_tensor(expert + name, hf, architecture).tolist()

    assert found("linear_fc1.weight") == [[200, 210], [202, 212], [201, 211], [203, 213]]
    assert found("linear_fc1.bias") == [200, 202, 201, 203]
    assert found("linear_fc2.weight") == [[200, 210], [201, 211]]


def test_a_stack_comes_with_its_last_expert(small):
    architecture, hf = small
    seen = []

    def given():
        for name, tensor in GPT_OSS.to_megatron(hf, architecture):
            seen.append(name)
            yield name, tensor

    came = {name: seen[-1] for name, _ in GPT_OSS.hf_tensors(given(), architecture)}
    last = "decoder.layers.0.mlp.experts.local_experts.2."
    assert came["model.layers.0.mlp.experts.gate_up_proj"] == last + "linear_fc1.weight"
    assert came["model.layers.0.mlp.experts.down_proj_bias"] == last + "linear_fc2.bias"
    assert came["model.layers.0.self_attn.sinks"].endswith("core_attention.sinks")


def test_a_stack_of_other_sizes_is_refused_by_the_fields_of_config_json(small):
    architecture, hf = small
    hf["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 2, 2)
    with pytest.raises(
        CheckpointError, match=r"down_proj: found shape \(4, 2, 2\); .*the number of experts = 3"
    ):
        GPT_OSS.check_weights(hf, architecture)


def test_sinks_are_cut_by_heads():
    architecture = GPT_OSS.architecture(tiny_config("gpt_oss"))
    weight = GPT_OSS.weight("decoder.layers.0.self_attention.core_attention.sinks", architecture)
    parts = split(torch.arange(4), weight.rule.shard, 2, architecture)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_frequencies_are_those_of_transformers(truncate):
    """Of a head of 64: to about one part in 10 million, in float32."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = TWENTY_B["rope_scaling"] | {"truncate": truncate}
    given = TWENTY_B | {"rope_scaling": scaling}
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**given), None)
    read = GPT_OSS.architecture(given)
    assert torch.allclose(inverse_frequencies(read), wanted, rtol=3e-7, atol=0)
    assert read.rope_scaling.attention_factor == pytest.approx(factor)
    assert GPT_OSS.architecture(given | {"rope_scaling": scaling | {"mscale": 2.0, "mscale_all_dim": 1.0}}).rope_scaling.attention_factor == pytest.approx((0.2 * math.log(32) + 1) / (0.1 * math.log(32) + 1))  # fmt: skip
