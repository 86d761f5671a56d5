"""What the package answers to core: folders whose weights are not what config.json says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry
from slime_models import hooks
from slime_models.family.chosen import family_of_config
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.qwen3_next import QWEN3_NEXT
from slime_models.hf.folder import save_hf

from .conftest import tiny_config


def problems(folder, registry=None, *flags):
    settings = load_settings(
        [], ["--hf-checkpoint", str(folder), "--rollout-batch-size", "2", "--rollout-max-response-len", "8", *flags],
        registry=Registry(),
    )  # fmt: skip
    build = BuildContext(
        settings=settings,
        registry=registry or Registry(),
        load_tokenizer=lambda: None,
        model_path=Path(folder),
        run_dir=Path(),
    )
    return [str(problem) for problem in hooks.slime_check_build(build)]


def test_weights_are_held_against_config_json_before_anything_starts(tmp_path):
    config = tiny_config("llama", tie_word_embeddings=True)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    shapes = LLAMA.hf_shapes(LLAMA.architecture(config))
    weights = ((name, torch.zeros(shape)) for name, shape in shapes.items())
    folder = save_hf(tmp_path / "model", weights, config_from=tmp_path / "source")
    assert problems(folder) == []
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    assert problems(folder) == [
        f"model.hf_checkpoint: found {folder}: model.layers.0.self_attn.k_proj.weight: found shape (12, 20); wanted "
        "(24, 20), by config.json: num_key_value_heads x head_dim = 24; wanted weights that its config.json describes"
    ]
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    (problem,) = problems(folder)
    assert "hidden_act: found 'relu'; wanted 'silu'" in problem


def test_weights_are_held_against_the_family_that_is_named_whatever_config_json_says(tmp_path):
    config = tiny_config("llama", tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = LLAMA.hf_shapes(LLAMA.architecture(config))
    weights = ((name, torch.zeros(shape)) for name, shape in shapes.items())
    folder = save_hf(tmp_path / "model", weights, config_from=tmp_path)
    mine = dataclasses.replace(
        LLAMA, architecture=lambda config: LLAMA.architecture(config | {"model_type": "llama"})
    )
    named = Families(mine, name="mine"), "--model-name", "mine"
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "qwen3"})
    )  # whose heads have norms
    assert problems(folder, *named) == []
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "x", "num_key_value_heads": 4}))
    (problem,) = problems(folder, *named)
    assert "k_proj.weight: found shape (12, 20); wanted (24, 20), by config.json" in problem


def test_names_folders_without_weights_and_foreign_families_are_left_to_others(tmp_path):
    assert problems("smollm2-135m") == problems(tmp_path / "nowhere") == problems(tmp_path) == []
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert problems(tmp_path) == []


def test_an_engine_that_does_not_serve_the_family_is_refused_with_its_reason(tmp_path):
    config = tiny_config("llama", tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert problems(tmp_path) == []
    unserved = dataclasses.replace(LLAMA, not_served={"torch": "it has no windows"})
    assert problems(tmp_path, Families(unserved)) == [
        f"rollout.rollout_engine: found torch with {tmp_path}, a llama model; wanted an engine that serves it; "
        "it has no windows"
    ]


def test_an_engine_that_needs_a_gpu_for_the_family_is_refused_on_a_cpu_of_this_machine_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", tie_word_embeddings=True)))
    families = Families(dataclasses.replace(LLAMA, not_served_on_cpu={"torch": "its kernels are for GPUs"}))
    (problem,) = problems(tmp_path, families)
    assert problem.endswith("an engine that serves it; its kernels are for GPUs")
    assert problems(tmp_path, families, "--launcher", "elsewhere") == []


@pytest.mark.parametrize("model_type", ["gpt_oss", "minimax_m2", "qwen3_5", "qwen3_5_moe_text"])
def test_sglang_is_refused_where_it_holds_weights_under_names_that_no_update_has_also_with_gpus_elsewhere(
    tmp_path, model_type
):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(model_type)))
    (problem,) = problems(tmp_path, None, "--launcher", "elsewhere", "--rollout-engine", "sglang")
    assert problem.endswith("no update could be proven")


#: An engine that may have GPUs, and whatever is said of the trainer.
SERVED = "--launcher", "elsewhere", "--rollout-engine", "sglang"
UNTRAINED = "--train-backend", "none"


@pytest.mark.parametrize("model_type", ["gpt_oss", "minimax_m2", "qwen3_5", "qwen3_5_moe_text"])
def test_where_nothing_is_trained_sglang_may_serve_what_no_update_could_be_proven_of(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(model_type)))
    assert len(problems(tmp_path, None, *SERVED)) == 1
    assert problems(tmp_path, None, *SERVED, *UNTRAINED) == []


def test_an_engine_that_does_not_serve_a_family_is_refused_also_where_nothing_is_trained(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("glm")))
    (problem,) = problems(tmp_path, None, *SERVED, *UNTRAINED)
    assert "a glm model; wanted an engine that serves it; SGLang 0.5.23 has no class of its own" in problem


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method: found 'awq'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type: found 'dynamic'"),
    ],
)
def test_where_nothing_is_trained_an_engine_that_reads_the_folder_by_itself_judges_its_weights(
    tmp_path, more, why
):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama") | more))
    save_file({"model.norm.weight": torch.zeros(20)}, tmp_path / "model.safetensors")
    (problem,) = problems(tmp_path, None, *SERVED)
    assert why in problem
    assert problems(tmp_path, None, *SERVED, *UNTRAINED) == []
    (problem,) = problems(tmp_path, None, "--rollout-engine", "torch", *UNTRAINED)
    assert why in problem


class Families(Registry):
    """A registry in which one family is installed, by a name or by every one."""

    def __init__(self, family, *, name=None):
        super().__init__()
        self._family, self._name = family, name

    def resolve(self, group, reference, *, flag=None):
        if group == "slime.models" and self._name in (None, reference):
            return self._family
        return super().resolve(group, reference, flag=flag)


def test_a_model_type_without_a_family_is_named_with_the_nearest_and_how_to_add_one(tmp_path):
    config = {"model_type": "qwen3_nxt"}
    wanted = (
        r"config\.json: model_type: found 'qwen3_nxt'; wanted a model family that is installed: .*"
        r"did you mean 'qwen3_next'\?; .*`slime models new NAME`"
    )
    with pytest.raises(PluginError, match=wanted):
        family_of_config(Registry(), config, tmp_path)
    assert family_of_config(Registry(), config, tmp_path, named="qwen3_next") is QWEN3_NEXT
    with pytest.raises(PluginError, match=r"model\.model_name: found 'qwen3_nxt'"):
        family_of_config(Registry(), config, tmp_path, named="qwen3_nxt")
