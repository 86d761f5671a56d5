"""Qwen 3 Next and Qwen 3.5 in the trainer: what transformers computes, state by state."""

from __future__ import annotations

import math
import re

import pytest
import torch
from slime_core.errors import CheckpointError
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.testing import check_trained_family, random_model
from slime_models.family.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from slime_models.family.families.qwen3_next import QWEN3_NEXT
from slime_models.hf.folder import HfCheckpoint, save_hf
from slime_models.quantization.reading import open_weights
from transformers import AutoModelForImageTextToText

#: Two key heads, of which each has three value heads. The epsilon is large because a delta net's output is divided by its own
#: size: where that is near zero, float32 loses what a bound of 1e-5 needs, in transformers as here.
TEXT = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
#: Family -> config.json; Qwen 3.5's with a vision tower, as published, and without.
MODELS = {
    QWEN3_NEXT: TEXT | EXPERTS | {"mlp_only_layers": [1]},
    QWEN3_5: {"text_config": TEXT, "vision_config": VISION},
    QWEN3_5_MOE: {"text_config": TEXT | EXPERTS, "vision_config": VISION},
    QWEN3_5_TEXT: TEXT | {"tie_word_embeddings": True},
    QWEN3_5_MOE_TEXT: TEXT | EXPERTS,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of random models whose states last: transformers' own draws forget within a token or two."""
    return {
        family: random_model(
            {"model_type": family.model_type} | config,
            tmp_path_factory.mktemp(family.model_type),
            shift={"A_log": -3.0},
        )
        for family, config in MODELS.items()
    }


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=pytest.mark.proves(family.model_type, "train", "convert", "lora"),
            id=family.model_type,
        )
        for family in MODELS
    ],
)
def test_a_family_computes_what_transformers_does(family, folders):
    check_trained_family(family, folders[family])


def test_flops_of_a_delta_net_do_not_grow_with_what_came_before():
    """One more token costs as much after 10 tokens as after 1,000, but for the one layer with attention."""
    from slime_megatron.families.delta_net_layers import delta_net_flops

    architecture = QWEN3_NEXT.architecture({"model_type": "qwen3_next"} | MODELS[QWEN3_NEXT])
    (near, far) = (
        delta_net_flops(architecture, TokenTree.of_prompt(n + 1, ()))
        - delta_net_flops(architecture, TokenTree.of_prompt(n, ()))
        for n in (10, 1000)
    )
    queries = 4 * 16
    assert far - near == 2 * 2 * queries * 990
    shared = delta_net_flops(architecture, TokenTree.of_prompt(100, (10, 20)))
    alone = [delta_net_flops(architecture, TokenTree.of_prompt(100, (n,))) for n in (10, 20)]
    assert sum(alone) - shared == delta_net_flops(architecture, TokenTree.of_prompt(100, ()))
    assert math.isfinite(shared)


def test_memory_is_reckoned_by_the_chunks_that_are_computed():
    from slime_megatron.memory.families import delta_net
    from slime_models import delta_rule

    assert delta_net.CHUNK == delta_rule.CHUNK


@pytest.fixture(scope="module")
def stacked(folders, tmp_path_factory):
    """The folder of Qwen 3.5 with experts as published: those of a layer in two tensors."""
    own, held = folders[QWEN3_5_MOE], {}
    parts = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
    weights = dict(HfCheckpoint(own))
    experts = sorted({found[1] for name in weights if (found := parts.fullmatch(name))})
    for layer in experts:
        matrices = {
            part: torch.stack([weights.pop(f"{layer}{i}.{part}_proj.weight") for i in range(5)])
            for part in ("gate", "up", "down")
        }
        held[f"{layer}gate_up_proj"] = torch.cat((matrices["gate"], matrices["up"]), dim=1)
        held[f"{layer}down_proj"] = matrices["down"]
    assert len(held) == 2 * 3
    return save_hf(tmp_path_factory.mktemp("stacked") / "hf", (weights | held).items(), config_from=own)


def test_published_folders_hold_the_same_model_and_go_out_an_expert_at_a_time(
    folders, stacked, make_learner, tmp_path
):
    """transformers reads both folders as one model; so do the trainer, which writes what transformers writes, and `convert`."""
    one, other = (AutoModelForImageTextToText.from_pretrained(x) for x in (folders[QWEN3_5_MOE], stacked))
    assert all(other.state_dict()[name].equal(tensor) for name, tensor in one.state_dict().items())
    before = HfCheckpoint(folders[QWEN3_5_MOE])
    learner = make_learner(folder=stacked, bf16=False)
    learner.save_hf(tmp_path / "hf")
    saved = HfCheckpoint(tmp_path / "hf")
    assert saved.keys() == before.keys()
    assert all(saved[name].equal(tensor) for name, tensor in before.items())


def test_a_stack_of_other_dimensions_is_named(stacked, tmp_path):
    weights = dict(HfCheckpoint(stacked))
    name = next(name for name in weights if name.endswith("experts.gate_up_proj"))
    weights[name] = weights[name].flatten(0, 1)
    folder = save_hf(tmp_path / "hf", weights.items(), config_from=stacked)
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj: found shape \(280, 48\); wanted experts x rows x columns"
    ):
        open_weights(folder, stacked=QWEN3_5_MOE.stacked)
