"""A quantised folder is read as the model's weights: DeepSeek's float8 blocks, and packed integers."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from slime_core.errors import CheckpointError
from slime_models.family.families.latent_attention.deepseek_v3 import DEEPSEEK_V3
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, save_hf
from slime_models.quantization.folder import quantize_folder
from slime_models.quantization.reading import open_weights

from ..conftest import tiny_config


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a tiny DeepSeek-V3 of bfloat16, matrices of 130 and 136 columns: their last blocks are cut off."""
    changes = {"hidden_size": 136, "q_lora_rank": 130, "num_nextn_predict_layers": 0}
    config = tiny_config("deepseek_v3", tie_word_embeddings=False, torch_dtype="bfloat16", **changes)
    folder = tmp_path_factory.mktemp("plain")
    (folder / "config.json").write_text(json.dumps(config))
    architecture = DEEPSEEK_V3.architecture(config)
    generator = torch.Generator().manual_seed(0)
    float32 = DEEPSEEK_V3.float32(architecture)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name in float32 else torch.bfloat16)
        for name, shape in DEEPSEEK_V3.hf_shapes(architecture).items()
    }
    return save_hf(folder / "hf", tensors.items(), config_from=folder)


def quantized(plain, folder, method, group_size=2):
    quantize_folder(
        plain,
        folder,
        DEEPSEEK_V3,
        method=method,
        group_size=group_size,
        max_file_bytes=10**9,
        ignore=("o_proj",),
    )
    return folder


def by_blocks(codes, scales, size=128):
    """Multiply each block of 128 x 128 codes by its scale."""
    found = codes.float()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            found[i * size : (i + 1) * size, j * size : (j + 1) * size] *= scales[i, j]
    return found


def test_float8_blocks_are_read_as_their_codes_times_their_scales(plain, tmp_path):
    folder = quantized(plain, tmp_path / "fp8", "fp8-block")
    stored, read, original = HfCheckpoint(folder), open_weights(folder), HfCheckpoint(plain)
    assert set(read) == set(original)
    assert len(read) == len(original)
    matrices = [name for name in original if name + "_scale_inv" in stored]
    assert {name.split(".")[-2] for name in matrices if "self_attn" in name} == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    }  # fmt: skip
    for name in original:
        if name in matrices:
            wanted = by_blocks(stored[name], stored[name + "_scale_inv"]).bfloat16()
            assert stored[name].dtype is torch.float8_e4m3fn
        else:
            wanted = original[name]
        assert read[name].dtype is wanted.dtype
        assert read[name].equal(wanted)
        assert read.shape(name) == tuple(original[name].shape)
    DEEPSEEK_V3.check_weights(read, DEEPSEEK_V3.architecture(read_config(folder)))


def test_packed_integers_are_read_near_what_they_were(plain, tmp_path):
    """Of two numbers that share a scale, the larger is 7.5 scales: a code is at most half a scale off, and the largest is 7."""
    folder = quantized(plain, tmp_path / "int4", "int4", group_size=1)
    read, original = open_weights(folder), HfCheckpoint(plain)
    assert set(read) == set(original)
    for name in original:
        assert read.shape(name) == tuple(original[name].shape)
        assert (read[name].float() - original[name].float()).abs().max() <= original[name].abs().max() / 7.5


def test_a_folder_that_is_not_quantised_is_read_as_it_is(plain):
    assert type(open_weights(plain)) is HfCheckpoint


def test_what_is_written_from_a_quantised_folder_is_not_called_quantised(plain, tmp_path):
    folder = quantized(plain, tmp_path / "fp8", "fp8-block")
    written = save_hf(tmp_path / "out", open_weights(folder).items(), config_from=folder)
    assert read_config(written) == read_config(plain)
    assert "quantization_config" in read_config(folder)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (".weight_scale_inv", "model.layers.0.self_attn.q_a_proj.weight: float8 without weight_scale_inv"),
        (".weight", "model.layers.0.self_attn.q_a_proj.weight: missing beside its scales"),
    ],
)
def test_a_matrix_without_scales_and_scales_without_a_matrix_are_named(plain, tmp_path, lost, message):
    folder = quantized(plain, tmp_path / "fp8", "fp8-block")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_a_proj" + lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_weights(folder)["model.layers.0.self_attn.q_a_proj.weight"]
