"""Folders of Megatron as what roles start from: names, tensors, and what is refused."""

from __future__ import annotations

import pytest
import torch
from slime_core.errors import CheckpointError
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import to_megatron
from slime_megatron.checkpoint.stored_as_hf import weights_of
from slime_megatron.settings.checks import role_problems
from slime_megatron.settings.section_roles import RolesSection
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint

from ..conftest import DEEPSEEK

STACKED = {"head_dim": 32, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def registry():
    return Registry.from_environment()


def model_of(folder, registry):
    config = read_config(folder)
    family = registry.resolve("slime.models", config["model_type"])
    return family, family.architecture(config)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"head_dim": 32}),
        ("gpt_oss", {"tie_word_embeddings": False} | STACKED),
        ("deepseek_v3", {"tie_word_embeddings": False} | DEEPSEEK),
    ],
)
def test_a_megatron_folder_has_the_tensors_of_the_hugging_face_folder(
    make_hf, registry, tmp_path, model_type, changes
):
    _, folder = make_hf(model_type, dtype=torch.bfloat16, **changes)
    to_megatron(folder, tmp_path / "megatron", registry)
    family, architecture = model_of(folder, registry)
    found, wanted = weights_of(tmp_path / "megatron", family, architecture), HfCheckpoint(folder)
    names = [name for name in wanted if name in found]
    assert set(found) == set(names) == set(family.hf_shapes(architecture))
    assert all(
        torch.equal(found[name], wanted[name]) and found.shape(name) == wanted[name].shape for name in names
    )
    assert "model.nothing" not in found
    family.check_weights(found, architecture)


def test_a_folder_of_another_layout_or_of_another_model_is_refused_before_anything_starts(
    make_hf, registry, tmp_path
):
    _, folder = make_hf("qwen3", head_dim=32)
    _, other = make_hf("qwen3", head_dim=16)
    to_megatron(other, tmp_path / "megatron", registry)
    family, architecture = model_of(folder, registry)
    (tmp_path / "fsdp").mkdir()
    (tmp_path / "fsdp/model_world_size_8_rank_0.pt").touch()
    with pytest.raises(CheckpointError, match="fsdp: no checkpoint; wanted a run's folder"):
        weights_of(tmp_path / "fsdp", family, architecture)
    roles = RolesSection(
        actor_load=str(tmp_path / "megatron"), ref_load=str(tmp_path / "fsdp"), critic_load=str(folder)
    )
    shape, layout = role_problems(roles, family, architecture)
    assert (
        shape.where == "roles.actor_load" and "self_attention" in shape.found and "has shape" in shape.found
    )
    assert layout.where == "roles.ref_load" and "no checkpoint" in layout.found
