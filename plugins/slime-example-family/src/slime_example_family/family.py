"""The weights of Gemma 3, and its config.json. Imports neither torch nor megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families import dense
from slime_models.family.family import ModelFamily
from slime_models.family.rules import rename

_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_GELU = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Architecture(Architecture):
    """What the layers read beside the common fields."""

    sliding_layers: tuple[int, ...]
    """Layers, from 0, whose tokens see `sliding_window` tokens, themselves among them."""
    sliding_window: int
    """Tokens."""
    sliding_rope_theta: float
    """Base of the rotary frequencies of sliding layers; `rope_theta` is that of the others."""
    query_pre_attn_scalar: float
    """Scores are divided by its square root."""


def _norm(megatron: str, hf: str) -> Any:
    return rename(f"{_LAYER}{megatron}.weight", f"{_HF_LAYER}{hf}.weight", ("hidden_size",))


#: Llama's, with norms of queries and keys, and norms after attention and MLP, too.
RULES = (
    dense.EMBEDDING,
    dense.INPUT_NORM,
    dense.QKV_WEIGHT,
    dense.QUERY_NORM,
    dense.KEY_NORM,
    dense.ATTENTION_OUTPUT,
    _norm("post_self_attn_layernorm", "post_attention_layernorm"),
    _norm("pre_mlp_layernorm", "pre_feedforward_layernorm"),
    dense.GATE_UP,
    dense.DOWN,
    _norm("post_mlp_layernorm", "post_feedforward_layernorm"),
    dense.FINAL_NORM,
    dense.OUTPUT,
)


def read_architecture(config: Mapping[str, Any]) -> Gemma3Architecture:
    """Read a Gemma 3 config.json, of transformers 5 or older; raises DataError, naming the field, for what is not supported."""
    read = ConfigReader(config)
    read.require("hidden_activation", (_GELU,), default=_GELU)
    read.require("use_bidirectional_attention", (False,), default=False)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if read.get(field) is not None:
            raise read.error(field, read.get(field), "null: capped scores and logits are not implemented")
    theta, sliding_theta = _rope_thetas(read)
    own = ("layer_types", "rope_parameters", "rope_scaling", "hidden_act")
    plain = {"tie_word_embeddings": True} | {name: value for name, value in config.items() if name not in own}
    common = dense.dense_architecture(
        plain | {"rope_theta": theta}, model_type="gemma3_text", head_dim=256, qk_layernorm=True
    )
    return Gemma3Architecture(
        **vars(dataclasses.replace(common, post_layernorms=True)),
        sliding_layers=_sliding_layers(read, common.num_layers),
        sliding_window=read.integer("sliding_window", 4096),
        sliding_rope_theta=sliding_theta,
        query_pre_attn_scalar=read.number("query_pre_attn_scalar", 256.0),
    )


def _rope_thetas(read: ConfigReader) -> tuple[float, float]:
    """Return the bases of global and of sliding layers: `rope_parameters` by kind of layer, or two older fields."""
    tables = read.get("rope_parameters")
    if tables is None:
        if read.get("rope_scaling") is not None:
            raise read.error("rope_scaling", read.get("rope_scaling"), "null: no scaling is implemented")
        return read.number("rope_theta", 1e6), read.number("rope_local_base_freq", 1e4)
    thetas = []
    for kind, default in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        table = ConfigReader(tables.get(kind) or {}, f"config.json: rope_parameters.{kind}")
        table.require("rope_type", ("default",), default="default")
        thetas.append(table.number("rope_theta", default))
    return thetas[0], thetas[1]


def _sliding_layers(read: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the sliding layers: as `layer_types` says, or all but each `sliding_window_pattern`-th."""
    kinds = read.get("layer_types")
    if kinds is None:
        every = read.integer("sliding_window_pattern", 6)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every)
    for index, kind in enumerate(kinds):
        if kind not in ("sliding_attention", "full_attention"):
            raise read.error(f"layer_types[{index}]", kind, "'sliding_attention' or 'full_attention'")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


GEMMA3 = ModelFamily(
    model_type="gemma3_text",
    rules=RULES,
    architecture=read_architecture,
    layers="slime_example_family.layers:LAYERS",
    decoder="slime_example_family.decoder:DECODER",
    not_updated={"sglang": "nobody has tried it with weights that a trainer sends"},
)
