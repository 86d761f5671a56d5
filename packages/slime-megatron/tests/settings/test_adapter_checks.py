"""Adapters that no folder of adapters has a place for are refused before anything starts."""

from __future__ import annotations

from slime_megatron.settings.checks import adapter_problems
from slime_megatron.settings.section_roles import LoraSection
from slime_models.family.families.gpt_oss import GPT_OSS

#: The sizes of gpt-oss-20b, but for its layers.
ARCHITECTURE = GPT_OSS.architecture(
    {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "max_position_embeddings": 131072,
    }
)


def problems(save_hf, **lora):
    return [str(each) for each in adapter_problems(save_hf, LoraSection(**lora), GPT_OSS, ARCHITECTURE)]


def test_folders_of_adapters_have_no_place_for_experts_that_folders_stack():
    (found,) = problems("out/{step}", rank=2)
    assert found.startswith(
        "checkpoint.save_hf: found it beside lora.target_modules linear_fc1, linear_fc2; wanted other layers for a gpt_oss model"
    )
    assert not problems("out/{step}", rank=2, target_modules=["linear_qkv", "linear_proj"])
    assert not problems(None, rank=2)
    assert not problems("out/{step}")
