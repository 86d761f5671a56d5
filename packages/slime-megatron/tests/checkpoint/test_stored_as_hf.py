"""Folders of Megatron as what roles start from: names, tensors, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from slime_core.errors import CheckpointError
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import to_megatron
from slime_megatron.checkpoint.role_checks import role_problems
from slime_megatron.checkpoint.stored_as_hf import weights_of
from slime_megatron.settings.section_roles import RolesSection
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint

from ..batches import make_batch
from ..learner.test_critic import actor_critic
from ..tiny_models import DEEPSEEK
from ..views import recording

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


def save_as_the_reference(model, folder):
    """Write a model by Megatron's own saver, in the layout of the reference: iterations beside a file that names the last."""
    from megatron.core import dist_checkpointing, parallel_state

    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    dist_checkpointing.save({"model": state, "iteration": 7}, str(iteration))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def test_a_model_whose_folder_has_no_weights_is_saved_once_others_are_trained(
    make_learner, qwen3, registry, tmp_path
):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_bytes((qwen3[1] / "config.json").read_bytes())
    to_megatron(qwen3[1], tmp_path / "megatron", registry)
    learner = make_learner(folder=tmp_path / "config", settings={"actor_path": tmp_path / "megatron"})
    learner.save_hf(tmp_path / "saved")
    saved, original = HfCheckpoint(tmp_path / "saved"), HfCheckpoint(qwen3[1])
    assert set(saved) == set(original)
    assert all(torch.equal(saved[name], original[name]) for name in original)


@pytest.mark.parametrize("form", ["hugging_face", "run"])
@pytest.mark.parametrize("role", ["actor_path", "ref_path", "critic_path"])
def test_weights_of_another_architecture_are_refused_where_every_shape_is_the_same(
    make_learner, qwen3, tmp_path, form, role
):
    """Another base of rotary embeddings is in no shape, and neither engine nor trainer would see it."""
    other = tmp_path / "other"
    other.mkdir()
    for path in qwen3[1].iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = read_config(other)
    rope = config.get("rope_parameters") or config
    rope["rope_theta"] = 1e6 + rope.get("rope_theta", 1e4)
    (other / "config.json").write_text(json.dumps(config))
    if form == "run":
        make_learner(folder=other).save(tmp_path / "run")
    given = other if form == "hugging_face" else tmp_path / "run"
    algorithm = actor_critic() if role == "critic_path" else recording("ref_log_probs")[0]
    with pytest.raises(CheckpointError, match=f"{given.name}: rope_theta is .*, the policy's is "):
        make_learner(algorithm, settings={role: given})


def test_a_reference_that_a_run_has_changed_is_not_taken_for_that_of_a_folder(make_learner, qwen3, tmp_path):
    changing = {"roles": RolesSection(ref_update_interval=1)}
    learner = make_learner(recording("ref_log_probs")[0], settings=changing)
    learner.train(make_batch())
    learner.save(tmp_path)
    with pytest.raises(
        CheckpointError, match="found a reference that --ref-update-interval has changed; wanted that of"
    ):
        make_learner(recording("ref_log_probs")[0], settings={"ref_path": qwen3[1]}).load(tmp_path)
    make_learner(recording("ref_log_probs")[0], settings=changing | {"ref_path": qwen3[1]}).load(tmp_path)
    make_learner(settings={"ref_path": qwen3[1]}).load(tmp_path)  # which reads none


def as_with_transformer_engine(model):
    """Have Megatron store layers one by one, as where `moe_layer_freq` is a list, and the norms before experts under their own names."""
    model.config.moe_layer_freq = [1] * model.config.num_layers
    for layer in model.decoder.layers:
        layer.submodules_config.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)


@pytest.mark.parametrize(
    ("kind", "has_transformer_engine"),
    [("qwen3", False), ("qwen3_moe", False), ("glm4", False), ("qwen3_moe", True)],
)
def test_a_folder_of_megatrons_own_saver_is_trained_and_becomes_a_hugging_face_folder(
    make_learner, cut_models, tmp_path, kind, has_transformer_engine
):
    """Without a learning rate the weights stay as they were, bit for bit; with one they move from there as from the original."""
    original = HfCheckpoint(cut_models[kind])
    model = make_learner(folder=cut_models[kind]).model
    if has_transformer_engine:
        as_with_transformer_engine(model)
    save_as_the_reference(model, tmp_path / "theirs")
    weights = {}
    for name, lr, settings in (
        ("still", 0.0, {"actor_path": tmp_path / "theirs"}),
        ("moved", 1e-2, {"actor_path": tmp_path / "theirs"}),
        ("wanted", 1e-2, {}),
    ):
        learner = make_learner(folder=cut_models[kind], lr=lr, settings=settings)
        learner.train(make_batch())
        learner.save_hf(tmp_path / name)
        weights[name] = HfCheckpoint(tmp_path / name)
    assert all(torch.equal(weights["still"][key], original[key]) for key in original)
    assert all(torch.equal(weights["moved"][key], weights["wanted"][key]) for key in original)
    assert not all(torch.equal(weights["moved"][key], original[key]) for key in original)
