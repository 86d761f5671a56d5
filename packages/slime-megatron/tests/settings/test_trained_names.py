"""Which parameters are trained, and where pipeline stages allow it."""

from __future__ import annotations

import pytest
from slime_megatron.settings.checks import frozen_layer_problems
from slime_megatron.settings.section import MegatronSection

NAMES = [
    "embedding.word_embeddings.weight",
    *(
        f"decoder.layers.{layer}.{part}.weight"
        for layer in range(12)
        for part in ("mlp.linear_fc1", "mlp.linear_fc2")
    ),
    "decoder.layers.11.mlp.experts.weight",
    "decoder.final_layernorm.weight",
    "mtp.layers.0.eh_proj.weight",
    "output_layer.weight",
]


def problems(stages, **patterns):
    section = MegatronSection(pipeline_model_parallel_size=stages, **patterns)
    return [str(problem) for problem in frozen_layer_problems(section, NAMES)]


@pytest.mark.parametrize(
    "patterns",
    [
        {"freeze_params_name_list": [r"layers\.0\."]},
        {"only_train_params_name_list": [r"layers\.1[01]\."]},
        {"freeze_params_name_list": [r"layers\.3\.mlp\.linear_fc1"]},
        {"only_train_params_name_list": ["output_layer"]},  # the first stage would train nothing
    ],
)
def test_stages_that_train_what_others_do_not_are_refused(patterns):
    (problem,) = problems(2, **patterns)
    assert problem.startswith(
        "megatron.pipeline_model_parallel_size: found 2 where all layers are frozen, or"
    )
    assert problems(1, **patterns) == []


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"freeze_params_name_list": ["embedding", "linear_fc1"]},
        {"only_train_params_name_list": ["linear_fc2"]},
        {"only_train_params_name_list": ["experts"]},  # which the first stage may lack
        {"only_train_params_name_list": [r"^mtp\."]},
        {"freeze_params_name_list": ["nothing of it"]},  # which is told when the model is built
    ],
)
def test_stages_that_train_the_same_of_all_layers_are_no_problem(patterns):
    assert problems(2, **patterns) == []
