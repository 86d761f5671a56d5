"""Quantised matrices against compressed-tensors and transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from slime_models.quantization.blocks import dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from .matrices import bits, weights

#: (rows, columns) of a block, by the name that compressed-tensors has for it.
BLOCKS = {"tensor": (None, None), "channel": (1, None), "block": (128, 128)}


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
