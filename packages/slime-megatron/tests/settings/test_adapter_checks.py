"""Adapters that no folder of adapters has a place for are refused before anything starts."""

from __future__ import annotations

import pytest
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_megatron import hooks
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


def problems(save_hf, *, actor_load=None, **lora):
    found = adapter_problems(save_hf, actor_load, LoraSection(**lora), GPT_OSS, ARCHITECTURE)
    return [str(each) for each in found]


def test_folders_of_adapters_have_no_place_for_experts_that_folders_stack():
    (found,) = problems("out/{step}", rank=2)
    assert found.startswith(
        "checkpoint.save_hf: found it beside lora.target_modules linear_fc1, linear_fc2; wanted other layers for a gpt_oss model"
    )
    assert not problems("out/{step}", rank=2, target_modules=["linear_qkv", "linear_proj"])
    assert not problems(None, rank=2)
    assert not problems("out/{step}")


def test_adapters_of_a_folder_of_megatron_are_not_to_be_written_as_ones_of_another_model(tmp_path):
    attention = {"rank": 2, "target_modules": ["linear_qkv"]}
    (found,) = problems("out/{step}", actor_load=str(tmp_path), **attention)
    assert (
        f"roles.actor_load {tmp_path}, which is no folder of Hugging Face; wanted adapters of a model"
        in found
    )
    assert not problems(None, actor_load=str(tmp_path), **attention)
    assert not problems("out/{step}", actor_load="smollm2-135m-instruct", **attention)
    (tmp_path / "config.json").touch()
    assert not problems("out/{step}", actor_load=str(tmp_path), **attention)


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        (("--lora-rank", "2", "--tensor-model-parallel-size", "2"), True),
        (("--lora-rank", "2"), False),
        (("--tensor-model-parallel-size", "2"), False),
        (
            ("--lora-rank", "2", "--lora-target-modules", "linear_qkv", "--tensor-model-parallel-size", "2"),
            False,
        ),
    ],
)
def test_adapters_of_shared_experts_want_their_own_communication(flags, is_refused):
    given = ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]
    given += ["--launcher", "ray", "--actor-num-gpus-per-node", "2", "--moe-shared-expert-overlap", *flags]
    found = hooks.slime_check_config(load_settings([], given, registry=Registry()), Registry())
    assert [each.where for each in found if "shared_expert" in each.where] == (
        ["megatron.megatron_args.moe_shared_expert_overlap"] if is_refused else []
    )
