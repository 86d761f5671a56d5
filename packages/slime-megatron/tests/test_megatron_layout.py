"""Layouts that a model does not allow: one error each, that names the setting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slime_core.errors import TrainerError
from slime_megatron.layout import check_model
from slime_megatron.section import MegatronSection
from slime_models.architecture import Architecture

DENSE = Architecture(
    model_type="qwen3",
    num_layers=6,
    hidden_size=8,
    ffn_hidden_size=9,
    num_attention_heads=12,
    num_query_groups=3,
    head_dim=2,
    vocab_size=16,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)
MOE = replace(DENSE, model_type="qwen3_moe", num_moe_experts=6, moe_ffn_hidden_size=9, moe_router_topk=2)


@pytest.mark.parametrize(
    ("architecture", "sizes", "message"),
    [
        (
            DENSE,
            {"pipeline_model_parallel_size": 4},
            "pipeline_model_parallel_size is 4; the model's 6 layers",
        ),
        (
            DENSE,
            {"tensor_model_parallel_size": 5},
            "tensor_model_parallel_size is 5; the model's 12 attention heads",
        ),
        (
            DENSE,
            {"tensor_model_parallel_size": 2},
            "tensor_model_parallel_size is 2; the model's 3 query groups",
        ),
        (
            replace(DENSE, ffn_hidden_size=10),
            {"tensor_model_parallel_size": 3},
            "tensor_model_parallel_size is 3; the model's 10 MLP columns cannot be cut into 3 equal parts, "
            "choose a divisor of 10",
        ),
        (
            DENSE,
            {"expert_model_parallel_size": 2},
            "expert_model_parallel_size is 2; a qwen3 model has no experts",
        ),
        (DENSE, {"use_routing_replay": True}, "a qwen3 model has none, leave it out"),
        (MOE, {"expert_model_parallel_size": 4}, "expert_model_parallel_size is 4; the model's 6 experts"),
        (
            MOE,
            {"expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size is 2; the model's 9 columns of an expert",
        ),
        (MOE, {"tensor_model_parallel_size": 3}, "for a model with experts; add sequence_parallel"),
        (DENSE, {"sequence_parallel": True}, "tensor_model_parallel_size is 1"),
        (
            DENSE,
            {"use_distributed_optimizer": True, "optimizer": "sgd"},
            "use_distributed_optimizer with optimizer sgd",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_refused_by_its_name(architecture, sizes, message):
    with pytest.raises(TrainerError) as error:
        check_model(MegatronSection(**sizes), architecture)
    assert message in str(error.value)


def test_sizes_that_divide_are_allowed():
    check_model(MegatronSection(tensor_model_parallel_size=3, pipeline_model_parallel_size=2), DENSE)
    check_model(
        MegatronSection(tensor_model_parallel_size=3, expert_model_parallel_size=6, sequence_parallel=True),
        MOE,
    )
