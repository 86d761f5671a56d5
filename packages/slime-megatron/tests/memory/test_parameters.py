"""What a rank holds, worked out by hand for models of a few hundred numbers."""

from __future__ import annotations

import pytest
from slime_core.testing.memory import TINY_QWEN3
from slime_megatron.memory.estimate import GRADIENTS, OPTIMIZER, WEIGHTS, RankSettings, static_parts
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.parameters import parameters_of_stages
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_moe import QWEN3_MOE

#: In the place of 384 numbers of the MLP: a router 4 x 8, and 4 experts of 2 x 4 x 8 + 8 x 4 = 96 each.
EXPERTS = {
    **TINY_QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "norm_topk_prob": True,
}


def stages(*, family=QWEN3, lora=None, section=None, mtp=False, ranks=1, config=TINY_QWEN3, **layout):
    architecture = family.architecture(config).with_mtp(mtp)
    sizes = Layout(ranks=ranks, **layout)
    return parameters_of_stages(
        family, architecture, section or MegatronSection(), lora or LoraSection(), sizes
    )


def test_one_rank_holds_and_trains_everything():
    (found,) = stages()
    assert found.shared == found.trained == 2 * 792 + 2 * 256 + 8
    assert found.experts == found.buffers == 0


def test_tensor_parallel_ranks_cut_matrices_and_hold_norms_whole():
    """Of a layer's 792 all but 2 x 8 + 2 x 4 = 24 numbers are in matrices."""
    (found,) = stages(ranks=2, tensor=2)
    assert found.shared == 2 * ((792 - 24) // 2 + 24) + 2 * 128 + 8


def test_pipeline_stages_hold_their_layers_and_the_last_one_norm_and_output_layer():
    assert [found.shared for found in stages(ranks=2, pipeline=2)] == [256 + 792, 792 + 8 + 256]


def test_the_last_stage_holds_a_tied_embedding_again():
    found = stages(ranks=2, pipeline=2, config=TINY_QWEN3 | {"tie_word_embeddings": True})
    assert [each.shared for each in found] == [256 + 792, 792 + 8 + 256]
    (alone,) = stages(config=TINY_QWEN3 | {"tie_word_embeddings": True})
    assert alone.shared == 2 * 792 + 256 + 8


def test_experts_are_shared_out_among_expert_parallel_ranks():
    (found,) = stages(family=QWEN3_MOE, config=EXPERTS, ranks=4, experts=2)
    assert found.shared == 2 * (792 - 384 + 32) + 2 * 256 + 8
    assert found.experts == found.trained_experts == 2 * 2 * 96


def test_experts_are_cut_by_expert_tensor_parallel_ranks():
    (found,) = stages(family=QWEN3_MOE, config=EXPERTS, ranks=4, tensor=2, expert_tensor=2, experts=2)
    assert found.experts == 2 * 2 * 96 // 2


def test_a_routers_bias_is_a_buffer_and_mtp_layers_are_on_the_last_stage():
    config = EXPERTS | {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    without, held = (
        stages(family=GLM4_MOE, config=config, ranks=2, pipeline=2, mtp=mtp) for mtp in (False, True)
    )
    assert [each.buffers for each in without] == [0, 4]  # one of each expert, in the one layer that has them
    assert [each.buffers for each in held] == [0, 8]
    # The projection 8 x 16, three norms of 8, a layer with experts, and a copy of the embedding.
    layer = (
        792 - 2 * 4 - 384 + 32 + 96
    )  # GLM has no norms of queries and keys here; a shared expert as wide as another
    assert held[1].shared - without[1].shared == 128 + 24 + layer + 256
    assert held[0].shared == without[0].shared


def test_adapters_alone_are_trained_with_lora():
    """Rank 2, of qkv (32 x 8) alone: 2 x (32 + 8) numbers a layer; half of the 32 rows on each of two tensor-parallel ranks."""
    lora = LoraSection(rank=2, target_modules=["linear_qkv"])
    (found,) = stages(lora=lora)
    assert found.trained == 2 * 2 * (32 + 8)
    assert found.shared == 2 * 792 + 2 * 256 + 8 + found.trained
    (cut,) = stages(lora=lora, ranks=2, tensor=2)
    assert cut.trained == 2 * 2 * (16 + 8)
    (by_columns,) = stages(lora=LoraSection(rank=2, target_modules=["linear_proj"]), ranks=2, tensor=2)
    assert by_columns.trained == 2 * 2 * (8 + 16 // 2)


def test_frozen_parameters_are_not_trained():
    (found,) = stages(section=MegatronSection(freeze_params_name_list=[r"linear_fc1"]))
    assert found.trained == found.shared - 2 * 256
    (only,) = stages(section=MegatronSection(only_train_params_name_list=[r"layers\.1\..*linear_fc"]))
    assert only.trained == 256 + 128


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"dtype_bytes": 2}, (2, 4, 12)),  # a float32 copy and two moments
        ({"dtype_bytes": 4}, (4, 4, 8)),  # float32 weights are their own copy
        ({"dtype_bytes": 2, "optimizer": "sgd"}, (2, 4, 8)),
        ({"dtype_bytes": 2, "optimizer": "sgd", "has_momentum": False}, (2, 4, 4)),
    ],
)
def test_weights_gradients_and_optimizer_take_so_many_bytes_a_number(settings, each):
    (found,) = stages()
    parts = static_parts(found, RankSettings(**settings), Layout(ranks=1))
    assert parts == dict(zip((WEIGHTS, GRADIENTS, OPTIMIZER), (2104 * size for size in each), strict=True))


def test_a_distributed_optimizer_shares_its_state_among_ranks_with_the_same_weights():
    """8 ranks, experts on 4 of them: others' weights are on 8 ranks alike, each expert on 2."""
    layout = Layout(ranks=8, experts=4)
    (found,) = stages(family=QWEN3_MOE, config=EXPERTS, ranks=8, experts=4)
    parts = static_parts(found, RankSettings(dtype_bytes=2, shared_optimizer=True), layout)
    shared, experts = 2 * 440 + 520, 2 * 96
    assert parts[OPTIMIZER] == 12 * (shared // 8 + experts // 2)
    assert parts[GRADIENTS] == 4 * (shared + experts)


@pytest.mark.parametrize(
    ("family", "changes", "published"),
    [
        (
            QWEN3,  # Qwen/Qwen3-4B
            {
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "tie_word_embeddings": True,
            },
            4_022_468_096,
        ),
        (
            QWEN3_MOE,  # Qwen/Qwen3-30B-A3B
            {
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 48,
                "num_key_value_heads": 4,
            },
            30_532_122_624,
        ),
    ],
)
def test_published_shapes_have_the_numbers_that_were_published(family, changes, published):
    sizes = {
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
    (found,) = stages(family=family, config=TINY_QWEN3 | sizes | changes)
    assert found.all == published
