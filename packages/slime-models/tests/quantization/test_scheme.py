"""Which tensors are quantised, and what stands in their place."""

from __future__ import annotations

import pytest
from slime_core.errors import WeightSyncError
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.quantization.config import FIELD, FORMATS, Kept, read_quantization
from slime_models.quantization.scheme import specs_of

from ..conftest import tiny_config
from .matrices import HALF_STEP, weights


def quantization_of(method, kept=(), group_size=8):
    return read_quantization({FIELD: FORMATS[method](Kept(modules=kept), group_size)})


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
