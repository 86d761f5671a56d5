"""Training from a folder of float8 blocks: the dequantised weights are trained, and what is written is not quantised."""

from __future__ import annotations

import pytest
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import to_hf, to_megatron
from slime_megatron.checkpoint.finding import find
from slime_models.family.families.latent_attention.deepseek_v3 import DEEPSEEK_V3
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint
from slime_models.quantization.folder import quantize_folder
from slime_models.quantization.reading import open_weights

from ..batches import make_batch
from ..comparison import sent


@pytest.fixture(scope="module")
def quantized(cut_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized") / "hf"
    quantize_folder(
        cut_models["deepseek_v3"],
        folder,
        DEEPSEEK_V3,
        method="fp8-block",
        group_size=32,
        max_file_bytes=10**9,
    )
    return folder


def test_a_learner_starts_from_the_dequantised_weights_and_writes_plain_ones(
    make_learner, quantized, tmp_path
):
    learner = make_learner(folder=quantized)
    wanted = open_weights(quantized)
    found = sent(learner)
    assert found.keys() == set(wanted)
    assert all(found[name].equal(wanted[name]) for name in wanted)
    learner.train(make_batch())
    learner.save_hf(tmp_path / "hf")
    written = HfCheckpoint(tmp_path / "hf")
    assert set(written) == set(wanted)
    assert any(not written[name].equal(wanted[name]) for name in wanted)
    assert "quantization_config" not in read_config(tmp_path / "hf")


def test_a_conversion_to_megatron_and_back_is_of_the_dequantised_weights(quantized, tmp_path):
    registry = Registry.from_environment()
    to_megatron(quantized, tmp_path / "megatron", registry)
    source = find(tmp_path / "megatron").weights
    to_hf(source, tmp_path / "hf", registry, config_from=tmp_path / "megatron/hf", max_file_bytes=10**9)
    wanted, found = open_weights(quantized), HfCheckpoint(tmp_path / "hf")
    assert set(found) == set(wanted)
    assert all(found[name].equal(wanted[name]) for name in wanted)
    assert "quantization_config" not in read_config(tmp_path / "hf")
