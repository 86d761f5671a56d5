"""Quantising a Hugging Face folder."""

from __future__ import annotations

import pytest
import torch
from slime_core.errors import CheckpointError
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.mimo import MIMO
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, save_hf
from slime_models.quantization.config import FIELD, FORMATS, read_quantization
from slime_models.quantization.folder import dequantize_folder, quantize_folder
from slime_models.quantization.reading import open_weights
from slime_models.quantization.scheme import specs_of
from slime_models.testing import check_quantized_family
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

from ..conftest import FAMILIES, tiny_config
from .matrices import HALF_STEP


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama of 2 layers, float32, of matrices that blocks of 128 fit."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def quantized_folder(folder, target, method, **options):
    options = {"group_size": 32, "max_file_bytes": 10**9} | options
    quantize_folder(folder, target, LLAMA, method=method, **options)
    return target


@pytest.mark.parametrize("method", FORMATS)
def test_a_folder_holds_what_its_config_json_says_and_dequantises_to_the_model(folder, tmp_path, method):
    found = quantized_folder(folder, tmp_path / "q", method)
    before, after = HfCheckpoint(folder), HfCheckpoint(found)
    config = read_config(found)
    quantization = read_quantization(config)
    shapes = LLAMA.hf_shapes(LLAMA.architecture(config))
    assert after.keys() == specs_of(shapes, dtype="float32", quantization=quantization).keys()
    for name, shape in shapes.items():
        if quantization.covers(name, shape):
            error = (quantization.dequantized(name, after) - before[name]).abs().max()
            assert 0 < error <= before[name].abs().max() / HALF_STEP
        else:
            assert torch.equal(after[name], before[name])


QUANTIZED = FAMILIES | {"mimo": MIMO}
#: Gate and up as one matrix in folders, the projections of delta nets, and the weights of an indexer's heads are not quantised.
LEFT_ALONE = (".gate_up_proj.weight", ".linear_attn.out_proj.weight", ".indexer.weights_proj.weight")
#: How matrices end that are: attention's, MLPs', MiniMax-M2's experts', and indexers' of DeepSeek-V3.2.
LINEAR = (
    "_proj.weight",
    "_proj_with_mqa.weight",
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
    ".wq_b.weight",
    ".wk.weight",
)


@pytest.mark.proves("{kind}", "fp8")
@pytest.mark.parametrize("kind", sorted(QUANTIZED))
def test_linear_layers_of_every_family_are_quantised_and_nothing_else(kind, tmp_path):
    """Quantised are the matrices of attention, MLPs and experts; not embeddings, norms, routers, gates and biases."""
    family, config = QUANTIZED[kind], tiny_config(kind, tie_word_embeddings=False)
    shapes = family.hf_shapes(family.architecture(config))
    linear = {name for name in shapes if name.endswith(LINEAR) and not name.endswith(LEFT_ALONE)}
    assert check_quantized_family(family, config, tmp_path) == linear


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        # SGLang looks for the parts of a fused matrix, and would take the whole for a quantised one.
        ("glm4", ["mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"]),
        # Experts in one tensor; transformers and SGLang would make quantised ones of them.
        ("gpt_oss", ["mlp.experts"]),
    ],
)
def test_what_is_not_quantised_is_named_as_engines_look_for_it(kind, named, tmp_path):
    check_quantized_family(QUANTIZED[kind], tiny_config(kind, tie_word_embeddings=False), tmp_path)
    kept = read_config(tmp_path / "quantised")[FIELD]["modules_to_not_convert"]
    assert {f"model.layers.0.{name}" for name in named} <= set(kept)


def test_transformers_loads_a_folder_of_blocks_with_the_weights_that_we_mean(folder, tmp_path):
    found = quantized_folder(folder, tmp_path / "q", "fp8-block", ignore=["layers.1.self_attn"])
    quantization, held = read_quantization(read_config(found)), HfCheckpoint(found)
    options = {"dtype": torch.float32, "quantization_config": FineGrainedFP8Config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(found, **options)
    for name, parameter in model.named_parameters():
        is_covered = quantization.covers(name, tuple(parameter.shape))
        assert is_covered == ("_proj" in name and "layers.1.self_attn" not in name)
        assert torch.equal(
            parameter.detach(), quantization.dequantized(name, held) if is_covered else held[name]
        )


@pytest.mark.parametrize("method", ["fp8-channel", "int4"])
def test_what_is_ignored_is_found_under_a_name_that_stacks_it_too(folder, tmp_path, method):
    found = quantized_folder(folder, tmp_path / "q", method, ignore=["layers.1.self_attn"])
    quantization = read_quantization(read_config(found))
    assert quantization.ignores("model.layers.1.self_attn.qkv_proj")  # SGLang's
    assert not quantization.ignores("model.layers.11.self_attn.qkv_proj")
    assert not quantization.ignores("model.layers.1.mlp.gate_up_proj")


def test_what_is_ignored_must_be_there(folder, tmp_path):
    with pytest.raises(CheckpointError, match="--ignore self_atn: no linear layer left has it"):
        quantized_folder(folder, tmp_path / "q", "int4", ignore=["self_atn"])
    assert not (tmp_path / "q").exists()


def test_a_folder_is_not_quantised_twice(folder, tmp_path):
    first = quantized_folder(folder, tmp_path / "q", "fp8-tensor")
    with pytest.raises(CheckpointError, match=r"its config\.json has quantization_config"):
        quantized_folder(first, tmp_path / "qq", "fp8-tensor")


def test_a_folder_with_a_weight_that_is_not_finite_leaves_nothing(folder, tmp_path):
    values = dict(HfCheckpoint(folder))
    name = "model.layers.1.mlp.down_proj.weight"
    values[name] = values[name].clone().index_fill_(0, torch.tensor([3]), float("nan"))
    save_hf(tmp_path / "damaged", values.items(), config_from=folder)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight: cannot be quantised"):
        quantized_folder(tmp_path / "damaged", tmp_path / "q", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize("method", FORMATS)
def test_a_folder_in_full_precision_has_what_is_read_of_the_quantised_one(folder, tmp_path, method):
    quantized = quantized_folder(folder, tmp_path / "few", method)
    n = dequantize_folder(quantized, tmp_path / "full", max_file_bytes=40_000)
    found, wanted, before = HfCheckpoint(tmp_path / "full"), open_weights(quantized), HfCheckpoint(folder)
    assert n == len(found) == len(wanted) and set(found) == set(before)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "quantization_config" not in read_config(tmp_path / "full")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").config.hidden_size == 128
    with pytest.raises(CheckpointError, match="has no quantization_config; wanted a quantised folder"):
        dequantize_folder(tmp_path / "full", tmp_path / "again", max_file_bytes=40_000)
    assert not (tmp_path / "again").exists()
