"""MTP layers that are not trained are not loaded, and are copied unchanged into every folder that is written."""

from __future__ import annotations

import json

import pytest
import torch
from slime_core.cli.main import run
from slime_core.files.checksums import seal
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import to_hf, to_megatron
from slime_megatron.checkpoint.finding import find
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


@pytest.fixture
def run_from_it(cut_models, with_mtp_layer, tmp_path):
    """A run of the model without the layer whose weights began as those of the folder with it."""
    to_megatron(cut_models["glm4_moe"], tmp_path / "megatron", Registry.from_environment())
    step = tmp_path / "run/checkpoints/step_000004"
    step.mkdir(parents=True)
    (tmp_path / "megatron/release").rename(step / "trainer")
    (step / "state.json").write_text("{}")
    seal(step, 4)
    config = (
        f'[model]\nhf_checkpoint = "{cut_models["glm4_moe"]}"\n[roles]\nactor_load = "{with_mtp_layer}"\n'
    )
    (tmp_path / "run/config.toml").write_text(config)
    return tmp_path / "run"


def test_a_run_that_started_from_other_weights_keeps_their_layer(run_from_it, tmp_path, capsys):
    assert run(["convert", "to-hf", str(run_from_it), str(tmp_path / "hf")]) == 0
    assert_passed_on(tmp_path / "hf")


def test_a_run_whose_first_weights_are_gone_is_converted_with_a_folder_that_is_named(
    run_from_it, cut_models, tmp_path, capsys
):
    config = (run_from_it / "config.toml").read_text().partition("[roles]")[0]
    (run_from_it / "config.toml").write_text(f'{config}[roles]\nactor_load = "/gone/sft"\n')
    command = ["convert", "to-hf", str(run_from_it), str(tmp_path / "hf")]
    assert run(command) == 2
    assert "its run started from /gone/sft (--actor-load), which is not there" in capsys.readouterr().err
    assert run([*command, "--config-from", str(cut_models["glm4_moe"])]) == 0


def test_a_conversion_says_when_it_has_no_such_layer(cut_models, tmp_path, capsys):
    registry = Registry.from_environment()
    to_megatron(cut_models["glm4_moe"], tmp_path / "megatron", registry)
    source = find(tmp_path / "megatron").weights
    to_hf(source, tmp_path / "hf", registry, config_from=tmp_path / "megatron/hf", max_file_bytes=10**9)
    assert (
        "no weights of multi-token prediction (MTP) layers, and its config.json says 1"
        in capsys.readouterr().err
    )
