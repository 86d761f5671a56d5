"""Layouts that a model does not allow: one error each, that names the setting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slime_core.errors import TrainerError
from slime_megatron.settings.parallel_checks import check_model, model_problems
from slime_megatron.settings.section import MegatronSection
from slime_models.family.architecture import Architecture
from slime_models.family.families.llama import LLAMA

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
            "megatron.pipeline_model_parallel_size: found 4; wanted a divisor of 6, the model's layers",
        ),
        (
            DENSE,
            {"tensor_model_parallel_size": 5},
            "megatron.tensor_model_parallel_size: found 5; wanted a divisor of 12, the model's attention heads",
        ),
        (
            DENSE,
            {"tensor_model_parallel_size": 2},
            "megatron.tensor_model_parallel_size: found 2; wanted a divisor of 3, the model's query groups",
        ),
        (
            replace(DENSE, ffn_hidden_size=10),
            {"tensor_model_parallel_size": 3},
            "megatron.tensor_model_parallel_size: found 3; wanted a divisor of 10, the model's MLP columns",
        ),
        (
            DENSE,
            {"expert_model_parallel_size": 2},
            "megatron.expert_model_parallel_size: found 2; wanted 1: a qwen3 model has no experts",
        ),
        (
            MOE,
            {"expert_model_parallel_size": 4},
            "megatron.expert_model_parallel_size: found 4; wanted a divisor of 6, the model's experts",
        ),
        (
            DENSE,
            {"use_routing_replay": True},
            "megatron.use_routing_replay: found it with a qwen3 model, which has no experts",
        ),
        (
            MOE,
            {"expert_tensor_parallel_size": 2},
            "megatron.expert_tensor_parallel_size: found 2; wanted a divisor of 9, the model's columns of an expert",
        ),
        (
            MOE,
            {"tensor_model_parallel_size": 3},
            "found 3 for a model with experts; wanted sequence_parallel with it",
        ),
        (
            DENSE,
            {"sequence_parallel": True},
            "megatron.sequence_parallel: found it with tensor_model_parallel_size 1",
        ),
        (
            DENSE,
            {"use_distributed_optimizer": True, "optimizer": "sgd"},
            "megatron.use_distributed_optimizer: found it with optimizer sgd",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_refused_by_its_name(architecture, sizes, message):
    with pytest.raises(TrainerError) as error:
        check_model(MegatronSection(**sizes), architecture, LLAMA)
    assert message in str(error.value)


def test_sizes_that_divide_are_allowed():
    check_model(MegatronSection(tensor_model_parallel_size=3, pipeline_model_parallel_size=2), DENSE, LLAMA)
    check_model(
        MegatronSection(tensor_model_parallel_size=3, expert_model_parallel_size=6, sequence_parallel=True),
        MOE,
        LLAMA,
    )


def test_everything_that_the_model_does_not_allow_is_reported_at_once():
    section = MegatronSection(tensor_model_parallel_size=5, pipeline_model_parallel_size=4)
    assert [problem.wanted for problem in model_problems(section, DENSE, LLAMA)] == [
        "a divisor of 6, the model's layers",
        "a divisor of 12, the model's attention heads",
        "a divisor of 3, the model's query groups",
        "a divisor of 9, the model's MLP columns",
    ]


@pytest.mark.parametrize(
    ("kind", "sizes", "setting"),
    [
        ("tensor", {"tensor_model_parallel_size": 3}, "tensor_model_parallel_size: found 3; wanted 1"),
        ("context", {"context_parallel_size": 2}, "context_parallel_size: found 2; wanted 1"),
        ("pipeline", {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size: found 2; wanted 1"),
        (
            "sequence",
            {"tensor_model_parallel_size": 3, "sequence_parallel": True},
            "sequence_parallel: found True; wanted False",
        ),
        (
            "expert_tensor",
            {"tensor_model_parallel_size": 3},
            "expert_tensor_parallel_size: found 3; wanted 1",
        ),
    ],
)
def test_a_layout_that_the_family_rules_out_is_refused_with_its_reason(kind, sizes, setting):
    family = replace(LLAMA, not_parallel={kind: "its layers would see half"})
    (problem,) = model_problems(MegatronSection(**sizes), DENSE, family)
    assert str(problem) == f"megatron.{setting} for a llama model; its layers would see half"
    assert not list(model_problems(MegatronSection(), DENSE, family))
    assert not list(model_problems(MegatronSection(**sizes), DENSE, LLAMA))


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        ("Ettt|tttL", None),  # three layers in each of two stages
        ("Et*3|t*3,L", None),
        ("E(tt)*2|(t)*2L", None),
        ("Et|tt|tt|tL", "of 4 stages"),  # two virtual ones for each rank
        ("E|(tt|)*3L", "of 5 stages"),
        ("Et|*3t*5,L", "of 4 stages"),
        ("Et*6,L", "of 1 stage"),
    ],
)
def test_a_layout_has_as_many_stages_as_ranks(layout, found):
    section = MegatronSection(
        pipeline_model_parallel_size=2, megatron_args={"pipeline_model_parallel_layout": layout}
    )
    problems = [str(problem) for problem in model_problems(section, DENSE, LLAMA)]
    wanted = (
        f"megatron.megatron_args.pipeline_model_parallel_layout: found {layout}, {found}; wanted 2, which is "
        "pipeline_model_parallel_size: a rank has one stage of consecutive layers, and no virtual ones"
    )
    assert problems == ([] if found is None else [wanted])
