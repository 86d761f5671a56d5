"""MTP layers that are not trained are not loaded, and are copied unchanged into every folder that is written."""

from __future__ import annotations

import json

import pytest
import torch
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import find, to_hf, to_megatron
from slime_models.hf.folder import HfCheckpoint, save_hf

from ..batches import make_batch

#: Of the layer after the last of two.
MTP_LAYER = {
    f"model.layers.2.{name}": torch.arange(4, dtype=torch.bfloat16) + i
    for i, name in enumerate(("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"))
}


@pytest.fixture(scope="module")
def with_mtp_layer(cut_models, tmp_path_factory):
    """The folder of the tiny GLM with such a layer, as those on the hub have one."""
    folder = cut_models["glm4_moe"]
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    weights = dict(HfCheckpoint(folder)) | MTP_LAYER
    return save_hf(tmp_path_factory.mktemp("glm") / "hf", weights.items(), config_from=folder)


def assert_passed_on(folder):
    found = HfCheckpoint(folder)
    assert all(
        found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in MTP_LAYER.items()
    )


def test_a_trained_model_keeps_the_layer_of_its_folder(make_learner, with_mtp_layer, tmp_path):
    learner = make_learner(folder=with_mtp_layer)
    learner.train(make_batch())
    learner.save_hf(tmp_path / "hf")
    assert_passed_on(tmp_path / "hf")
    assert set(HfCheckpoint(tmp_path / "hf")) == set(HfCheckpoint(with_mtp_layer))


def test_the_layer_goes_there_and_back(with_mtp_layer, tmp_path, capsys):
    registry = Registry.from_environment()
    to_megatron(with_mtp_layer, tmp_path / "megatron", registry)
    source = find(tmp_path / "megatron").weights
    to_hf(source, tmp_path / "hf", registry, config_from=tmp_path / "megatron/hf", max_file_bytes=10**9)
    assert_passed_on(tmp_path / "hf")
    assert not capsys.readouterr().err


def test_a_conversion_says_when_it_has_no_such_layer(cut_models, tmp_path, capsys):
    registry = Registry.from_environment()
    to_megatron(cut_models["glm4_moe"], tmp_path / "megatron", registry)
    source = find(tmp_path / "megatron").weights
    to_hf(source, tmp_path / "hf", registry, config_from=tmp_path / "megatron/hf", max_file_bytes=10**9)
    assert (
        "no weights of multi-token prediction (MTP) layers, and its config.json says 1"
        in capsys.readouterr().err
    )
