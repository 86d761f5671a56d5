"""Quantised weights: numbers worked out by hand, and code for code what other programs make of the same weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from slime_core.errors import CheckpointError, DataError, WeightSyncError
from slime_core.protocols import TransferPlan
from slime_core.weights import MemoryChannel
from slime_models.checkpoint import HfCheckpoint, read_config, save_hf
from slime_models.families.glm4_moe import GLM4_MOE
from slime_models.families.llama import LLAMA
from slime_models.fingerprint import fingerprint
from slime_models.quantization.blocks import dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4
from slime_models.quantization.config import FIELD, FORMATS, Kept, read_quantization
from slime_models.quantization.folder import quantize_folder
from slime_models.quantization.scheme import specs_of
from slime_models.transfer.sender import WeightSender
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from .conftest import tiny_config

#: (rows, columns) of a block, by the name that compressed-tensors has for it.
BLOCKS = {"tensor": (None, None), "channel": (1, None), "block": (128, 128)}
#: Largest magnitude over the largest error: 15 for integers (half of 1 / 7.5) and 28 for float8 (16 of 448), but for scales of
#: bfloat16.
HALF_STEP = 14.9


def weights(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def quantization_of(method, kept=(), group_size=8):
    return read_quantization({FIELD: FORMATS[method](Kept(modules=kept), group_size)})


def test_float8_codes_are_the_nearest_multiples_of_a_block_s_scale():
    codes, scales = quantize_fp8(torch.tensor([[896.0, -448.0], [3.0, 34.0]]), rows=2, columns=2)
    assert scales.tolist() == [[2.0]]  # 896 / 448
    assert codes.float().tolist() == [[448.0, -224.0], [1.5, 16.0]]  # 17 lies between 16 and 18: to even


def test_a_power_of_two_is_the_next_one_and_one_that_is_one_already_stays():
    _, scales = quantize_fp8(torch.tensor([[448.0, 449.0, 224.0, 0.0]]), rows=1, columns=1, power_of_two=True)
    assert scales.tolist() == [[1.0, 2.0, 0.5, 1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_that_the_edge_cuts_have_scales_of_their_own(dtype):
    weight = torch.zeros(130, 200, dtype=dtype)
    weight[0, 0], weight[129, 127], weight[3, 199] = 448.0, 44.8, -896.0
    codes, scales = quantize_fp8(weight, rows=128, columns=128)
    wanted = torch.tensor([[448.0, 896.0], [float(weight[129, 127]), 448.0]]) / 448
    assert torch.equal(scales, wanted)  # the last block holds nothing but zeros, and has scale 1
    assert codes.shape == weight.shape
    assert torch.equal(dequantize_fp8(codes, scales, rows=128, columns=128), weight.float())


def test_integers_are_packed_lowest_bits_first_and_never_beyond_their_range():
    row = torch.tensor([[7.5, -7.5, 3.5, 2.5, 0.0, 1.0, -1.0, 0.4]])
    packed, scales = quantize_int4(row, group_size=8, dtype=torch.float32)
    assert scales.tolist() == [[1.0]]  # 7.5 / 7.5
    assert packed.tolist() == [[0x8798AC0F - (1 << 32)]]  # 7 -8 4 2 0 1 -1 0, each + 8
    assert dequantize_int4(packed, scales, columns=8).tolist() == [[7, -8, 4, 2, 0, 1, -1, 0]]


def test_columns_that_do_not_fill_a_word_come_back():
    weight = torch.tensor([[-7.5, *range(-6, 8)]] * 2)  # 15 columns
    packed, scales = quantize_int4(weight, group_size=15, dtype=torch.float32)
    assert packed.shape == (2, 2)
    assert dequantize_int4(packed, scales, columns=15).tolist() == [[-8, *range(-6, 8)]] * 2


@pytest.mark.parametrize("largest", [0.0, 1e-40])
def test_a_group_of_zeros_or_of_less_than_a_scale_can_say_is_finite(largest):
    weight = torch.full((1, 8), largest)
    codes, scales = quantize_fp8(weight, rows=1, columns=8)
    assert codes.float().isfinite().all()
    assert (scales > 0).all()
    packed, scales = quantize_int4(weight, group_size=8, dtype=torch.float16)
    assert dequantize_int4(packed, scales, columns=8).tolist() == [[0.0] * 8]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("strategy", BLOCKS)
def test_float8_is_compressed_tensors_bit_for_bit(strategy):
    weight = weights(256, 384)
    rows, columns = BLOCKS[strategy]
    tiles = weight.float().reshape(256 // (rows or 256), rows or 256, -1, columns or 384)
    block = {"block_structure": [rows, columns]} if strategy == "block" else {}
    arguments = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **block)
    wanted, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), arguments)
    theirs = quantize(
        weight.float(),
        wanted.reshape(1) if strategy == "tensor" else wanted,
        zero,
        arguments,
        dtype=torch.float8_e4m3fn,
    )
    codes, scales = quantize_fp8(weight, rows=rows, columns=columns)
    assert torch.equal(scales, wanted)
    assert torch.equal(bits(codes), bits(theirs))


@pytest.mark.parametrize("group_size", [32, 128])
def test_integers_are_compressed_tensors_bit_for_bit(group_size):
    weight = weights(64, 256)
    groups = weight.unflatten(1, (-1, group_size))
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group_size)
    wanted, zero = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
    theirs = quantize(weight.float(), wanted.float(), zero.float(), arguments, dtype=torch.int8)
    packed, scales = quantize_int4(weight, group_size=group_size, dtype=torch.bfloat16)
    assert torch.equal(scales, wanted)
    assert torch.equal(packed, pack_to_int32(theirs, 4))
    restored = dequantize(theirs, wanted.float(), zero.float(), arguments)
    assert torch.equal(dequantize_int4(packed, scales, columns=256), restored)


def test_codes_are_those_of_transformers_and_scales_within_their_last_bit():
    weight = weights(256, 384)
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None)
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"w.weight": weight})
    codes, scales = quantize_fp8(weight, rows=128, columns=128)
    apart = scales.view(torch.int32) - theirs["w.weight_scale_inv"].view(torch.int32)
    assert apart.abs().max() <= 1  # which multiplies by the reciprocal
    assert torch.equal(bits(codes), bits(theirs["w.weight"]))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("method", FORMATS)
def test_weights_that_are_not_finite_are_refused_by_name(method, value):
    weight = weights(16, 16)
    weight[3, 5] = value
    with pytest.raises(
        WeightSyncError, match=r"layers\.0\.mlp\.up_proj\.weight: cannot be quantised: found inf or nan"
    ):
        dict(quantization_of(method).tensors("model.layers.0.mlp.up_proj.weight", weight))


def test_groups_that_do_not_fit_are_refused_by_name():
    with pytest.raises(
        WeightSyncError, match=r"up_proj\.weight: .*found 20 columns; wanted a multiple of .* 8"
    ):
        dict(quantization_of("int4").tensors("model.layers.0.mlp.up_proj.weight", weights(16, 20)))


def glm_shapes():
    return GLM4_MOE.hf_shapes(GLM4_MOE.architecture(tiny_config("glm4_moe", tie_word_embeddings=False)))


def test_linear_layers_are_quantised_and_nothing_else():
    shapes, quantization = glm_shapes(), quantization_of("fp8-block")
    plain = {name for name, shape in shapes.items() if not quantization.covers(name, shape)}
    kinds = {name.split(".", 3)[-1] if ".layers." in name else name for name in plain}
    assert kinds == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        *(f"self_attn.{part}_proj.bias" for part in "qkv"),
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
    }
    assert quantization.covers("model.layers.1.mlp.experts.2.down_proj.weight", (20, 10))
    assert quantization.covers("model.layers.1.mlp.shared_experts.up_proj.weight", (20, 20))


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_modules_that_config_json_keeps_are_kept(method):
    base = FORMATS["fp8-block" if method == "fp8" else "int4"]
    own = {"fp8": ["layers.0.mlp", "o_proj"], "compressed-tensors": ["re:.*layers[.]0[.]mlp", "o_proj"]}[
        method
    ]
    quantization = read_quantization({FIELD: base(Kept(modules=own), 8)})
    name = "model.layers.{}.{}.weight"
    assert not quantization.covers(name.format(0, "mlp.up_proj"), (8, 8))
    assert quantization.covers(name.format(1, "mlp.up_proj"), (8, 8))
    assert not quantization.covers(name.format(1, "self_attn.o_proj"), (8, 8))
    assert quantization.covers(name.format(0, "self_attn.q_proj"), (8, 8))


@pytest.mark.parametrize("method", FORMATS)
def test_what_is_sent_is_what_was_announced(method):
    quantization, name = quantization_of(method, group_size=32), "model.layers.0.self_attn.k_proj.weight"
    weight = weights(200, 96)
    specs = specs_of({name: (200, 96), "b": (3,)}, dtype="bfloat16", quantization=quantization)
    assert specs.pop("b").dtype == "bfloat16"
    sent = dict(quantization.tensors(name, weight))
    found = {part: (tuple(tensor.shape), f"torch.{specs[part].dtype}") for part, tensor in sent.items()}
    assert found == {part: (spec.shape, str(sent[part].dtype)) for part, spec in specs.items()}
    restored = quantization.dequantized(name, sent)
    assert (restored - weight.float()).abs().max() <= weight.float().abs().max() / HALF_STEP


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "gptq"}, "quant_method: found 'gptq'; wanted 'fp8' or 'compressed-tensors'"),
        ({"activation_scheme": "static"}, "activation_scheme: found 'static'"),
        ({"fmt": "e5m2"}, "fmt: found 'e5m2'; wanted 'e4m3'"),
        ({"weight_block_size": [128]}, "weight_block_size: found .128.; wanted two sizes"),
        ({"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo: found 'FP8'"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(change, named):
    with pytest.raises(DataError, match=f"config.json: quantization_config.{named}"):
        read_quantization({FIELD: FORMATS["fp8-block"](Kept(), 8) | change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"strategy": "tensor_group"}, "weights: found .'int', 4, 'tensor_group'."),
        ({"symmetric": False}, "weights.symmetric: found False; wanted True"),
        ({"group_size": None}, "weights.group_size: found None"),
        ({"actorder": "group"}, "weights.actorder: found 'group'"),
    ],
)
def test_what_is_not_supported_of_compressed_tensors_is_refused_by_its_field(change, named):
    said = FORMATS["int4"](Kept(), 8)
    said["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(DataError, match=f"config_groups.group_0.{named}"):
        read_quantization({FIELD: said})


def test_a_sender_quantises_what_the_plan_says_and_fingerprints_what_it_sends():
    name, channel = "model.layers.0.mlp.up_proj.weight", MemoryChannel()
    values = {name: weights(16, 16), "model.norm.weight": weights(16, 1)[:, 0]}
    plan = TransferPlan(
        transport="memory",
        version="1",
        dtype="bfloat16",
        channel=channel,
        quantization=FORMATS["fp8-block"](Kept(), 8),
    )

    async def buckets():
        yield list(values.items()), {name: fingerprint(tensor) for name, tensor in values.items()}

    async def scenario():
        sending = asyncio.ensure_future(WeightSender(asyncio.to_thread).send(plan, buckets()))
        arrived = [pair async for bucket in channel.buckets() for pair in bucket]
        return await sending, dict(arrived)

    said, arrived = asyncio.run(scenario())
    codes, scales = quantize_fp8(values[name], rows=128, columns=128)
    assert list(arrived) == [name, name + "_scale_inv", "model.norm.weight"]
    assert torch.equal(bits(arrived[name]), bits(codes))
    assert torch.equal(arrived[name + "_scale_inv"], scales)
    assert said == {name: fingerprint(tensor) for name, tensor in arrived.items()}


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
