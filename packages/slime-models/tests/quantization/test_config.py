"""Reading `quantization_config`."""

from __future__ import annotations

import pytest
from slime_core.errors import DataError
from slime_models.quantization.config import FIELD, FORMATS, Kept, read_quantization


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


def test_blocks_under_the_dtypes_own_name_are_blocks():
    """As MiniMax-M2.7's config.json says it."""
    said = {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }  # fmt: skip
    found = read_quantization({FIELD: said})
    moe = "model.layers.0.block_sparse_moe"
    assert found.covers(f"{moe}.experts.0.w1.weight", (8, 8))
    assert not found.covers(f"{moe}.gate.weight", (8, 8))


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


@pytest.mark.parametrize(
    "said",
    [
        3, ["fp8"], {"quant_method": ["fp8"]}, {"quant_method": "fp8", "weight_block_size": 3},
        {"quant_method": "fp8", "modules_to_not_convert": 3}, {"quant_method": "compressed-tensors", "config_groups": 3},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": [1]}},
    ],
)  # fmt: skip
def test_what_is_no_description_of_a_quantisation_is_refused(said):
    with pytest.raises(DataError, match=r"config.json: quantization_config.*: found .*; wanted"):
        read_quantization({FIELD: said})
