"""The reference system's 39 models: their Megatron arguments, held against what the family reads from config.json.

`published_models.json` has for each model the sizes of its published config.json and the arguments of its script. Where a script
contradicts its model, `contradicts` names the arguments.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry
from slime_megatron.settings import megatron_flags
from slime_megatron.settings.model_flags import DESCRIBED, contradictions
from slime_models.family.families.qwen3_moe import QWEN3_MOE

MODELS = json.loads((Path(__file__).parent / "published_models.json").read_text())
#: Families of these models that slime does not have yet.
NOT_THERE: set[str] = set()
#: Flags without a value: a script that leaves one out says no.
SWITCHES = (
    "add_qkv_bias",
    "moe_shared_expert_gate",
    "qk_layernorm",
    "rotary_interleaved",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
)
#: What the reference system's scripts say beside the model: which code builds it, and how it is computed.
REFUSED = {
    "allgather_cp",
    "attention_softmax_in_fp32",
    "enable_experimental",
    "make_vocab_size_divisible_by",
    "mscale",
    "mscale_all_dim",
    "no_position_embedding",
    "seq_length",
    "spec",
    "use_gated_attention",
}
#: Of the reference system's patch of Megatron, which has no such flags: what they mean follows from the family.
PATCH = {"post_mlp_layernorm": "post_layernorms", "post_self_attn_layernorm": "post_layernorms"}
FOLLOWED = {
    "apply_layernorm_1p",
    "attention_output_gate",
    "disable_bias_linear",
    "moe_aux_loss_coeff",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
    "moe_token_drop_policy",
    "mtp_num_layers",
    "no_masked_softmax_fusion",
    "no_rope_fusion",
}


@pytest.fixture(scope="module")
def registry():
    return Registry.from_environment()


def test_there_are_39_models_and_those_whose_family_is_missing_are_known(registry):
    assert len(MODELS) == 39
    kinds = {model["config"]["model_type"] for model in MODELS.values()}
    assert kinds >= NOT_THERE
    for kind in NOT_THERE:
        with pytest.raises(PluginError):
            registry.resolve("slime.models", kind)


@pytest.mark.parametrize(
    "name", [name for name, model in MODELS.items() if model["config"]["model_type"] not in NOT_THERE]
)
def test_each_argument_of_a_script_is_what_the_family_reads(registry, name):
    model, arguments = MODELS[name], MODELS[name]["arguments"]
    architecture = registry.resolve("slime.models", model["config"]["model_type"]).architecture(
        model["config"]
    )
    said = dict.fromkeys(SWITCHES, False) | arguments
    found = {problem.where.rpartition(".")[2] for problem in contradictions(said, architecture)}
    assert found == set(model.get("contradicts", ()))
    for flag, field in PATCH.items():
        assert getattr(architecture, field) == arguments.get(flag, False)
    assert architecture.mtp_num_layers >= int(arguments.get("mtp_num_layers", 0))
    others = arguments.keys() - DESCRIBED.keys() - PATCH.keys()
    refused = {
        problem.where.rpartition(".")[2] for problem in megatron_flags.problems(dict.fromkeys(others, ""))
    }
    assert refused == others & REFUSED
    assert others - refused <= FOLLOWED


#: Argument -> what no model of the table has.
WRONG = {
    "num_layers": "7", "hidden_size": "7", "ffn_hidden_size": "7", "num_attention_heads": "7", "num_query_groups": "7",
    "kv_channels": "7", "vocab_size": "7", "max_position_embeddings": "7", "normalization": "LayerNorm",
    "norm_epsilon": "7", "swiglu": False, "untie_embeddings_and_output_weights": False, "add_qkv_bias": True,
    "qk_layernorm": False, "position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": False,
    "rotary_base": "7", "rotary_percent": "0.7", "rotary_interleaved": True, "use_rope_scaling": True,
    "rope_scaling_factor": "7", "rotary_scaling_factor": "7", "num_experts": "7", "moe_layer_freq": "[0]*3+[1]*45",
    "moe_ffn_hidden_size": "7", "moe_router_topk": "7", "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True, "moe_router_num_groups": "7", "moe_router_group_topk": "7",
    "moe_router_topk_scaling_factor": "7", "moe_shared_expert_intermediate_size": "7", "moe_shared_expert_gate": True,
    "group_query_attention": False, "multi_latent_attention": True, "kv_lora_rank": "7", "q_lora_rank": "7",
    "qk_head_dim": "7", "qk_pos_emb_head_dim": "7", "v_head_dim": "7",
}  # fmt: skip


def test_every_flag_that_contradicts_the_model_is_named():
    assert WRONG.keys() == DESCRIBED.keys()
    architecture = QWEN3_MOE.architecture(MODELS["qwen3-30B-A3B"]["config"])
    for flag, value in WRONG.items():
        (problem,) = contradictions({flag: value}, architecture)
        assert str(problem).startswith(f"megatron.megatron_args.{flag}: found {value}; wanted ")


@pytest.mark.parametrize(
    ("value", "agrees"),
    [
        ("[1]*48", True), ("1", True), (1, True), ([1] * 48, True), ("[1]*24+[1,1]*12", True),
        ("[1]*47", False), ("2", False), ("0", False), ("[1", False), ("([0,1]*24)", False),
    ],
)  # fmt: skip
def test_layers_with_experts_are_a_list_or_one_in_so_many(value, agrees):
    architecture = QWEN3_MOE.architecture(MODELS["qwen3-30B-A3B"]["config"])
    assert (not list(contradictions({"moe_layer_freq": value}, architecture))) == agrees
    if value == "2":
        every_other = QWEN3_MOE.architecture(MODELS["qwen3-30B-A3B"]["config"] | {"decoder_sparse_step": 2})
        # Megatron's 1 in 2 begins with the first layer, transformers' with the second.
        assert list(contradictions({"moe_layer_freq": value}, every_other))
        assert not list(contradictions({"moe_layer_freq": "[0,1]*24"}, every_other))
