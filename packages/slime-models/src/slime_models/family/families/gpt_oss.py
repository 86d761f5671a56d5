"""gpt-oss: windows in every other layer, a learnt sink in each head's softmax, biases everywhere, experts with a clamped SwiGLU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_models.family.architecture import MOST_PARTS, Architecture, ConfigReader
from slime_models.family.families.dense import QKV_BIAS, dense_architecture, dense_rules
from slime_models.family.family import ModelFamily
from slime_models.family.rules import RENAME, Rule, Shard, WeightLayout, moe_layers, rename

if TYPE_CHECKING:
    from torch import Tensor

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_MLP, _HF_MLP = f"{_MEGATRON}mlp.", f"{_HF}mlp."
_EXPERT = f"{_MLP}experts.local_experts.{{expert}}."
#: `rope_scaling` where a file has neither it nor `rope_parameters`; transformers' default, and that of published files.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssArchitecture(Architecture):
    """What the layers read beside the common fields."""

    sliding_layers: tuple[int, ...]
    """Layers, from 0, whose tokens see `sliding_window` tokens, themselves among them."""
    sliding_window: int | None
    """Tokens; None where there are no such layers."""
    swiglu_alpha: float
    """Gain of the sigmoid in the experts' activation."""
    swiglu_limit: float
    """Most that gate and up are, and the least that up is, negated."""


def _pack_transposed(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    return parts[0].t()


def _unpack_transposed(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    return (tensor.t(),)


def _gate_above_up(interleaved: Tensor) -> Tensor:
    import torch

    return torch.cat((interleaved[0::2], interleaved[1::2]))


def _interleaved(gate_above_up: Tensor) -> Tensor:
    import torch

    return torch.stack(gate_above_up.chunk(2), dim=1).flatten(0, 1)


def _pack_gated(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    return _gate_above_up(parts[0].t())


def _unpack_gated(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    return (_interleaved(tensor).t(),)


def _pack_gated_bias(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    return _gate_above_up(parts[0])


def _unpack_gated_bias(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    return (_interleaved(tensor),)


#: One matrix, transposed.
TRANSPOSED = WeightLayout("transposed", _pack_transposed, _unpack_transposed)
#: Gate above up; in folders the columns of one matrix, by turns.
GATED_COLUMNS = WeightLayout("gated columns", _pack_gated, _unpack_gated)
#: The bias of both.
GATED_BIAS = WeightLayout("gated bias", _pack_gated_bias, _unpack_gated_bias)


def _of_experts(
    megatron: str,
    hf: str,
    dims: tuple[str, ...],
    hf_dims: tuple[str, ...],
    layout: WeightLayout,
    shard: Shard,
) -> Rule:
    """Return the rule of an expert's tensor; folders have those of all experts as one."""
    rule = rename(f"{_EXPERT}{megatron}", f"{_HF_MLP}experts.{hf}", dims, shard=shard, layers=moe_layers)
    stacked = ((f"{_HF_MLP}experts.{hf}", ("num_moe_experts", *hf_dims)),)
    return dataclasses.replace(rule, hf=stacked, layout=layout)


SINKS = rename(
    f"{_MEGATRON}self_attention.core_attention.sinks",
    f"{_HF}self_attn.sinks",
    ("num_attention_heads",),
    shard=Shard.ROWS,
)
OUTPUT_BIAS = rename(
    f"{_MEGATRON}self_attention.linear_proj.bias", f"{_HF}self_attn.o_proj.bias", ("hidden_size",)
)
ROUTER, ROUTER_BIAS = (
    rename(f"{_MLP}router.{name}", f"{_HF_MLP}router.{name}", dims, layers=moe_layers)
    for name, dims in (("weight", ("num_moe_experts", "hidden_size")), ("bias", ("num_moe_experts",)))
)
EXPERTS = (
    _of_experts(
        "linear_fc1.weight",
        "gate_up_proj",
        ("moe_gated_size", "hidden_size"),
        ("hidden_size", "moe_gated_size"),
        GATED_COLUMNS,
        Shard.GATED_ROWS,
    ),
    _of_experts(
        "linear_fc1.bias",
        "gate_up_proj_bias",
        ("moe_gated_size",),
        ("moe_gated_size",),
        GATED_BIAS,
        Shard.GATED_ROWS,
    ),
    _of_experts(
        "linear_fc2.weight",
        "down_proj",
        ("hidden_size", "moe_ffn_hidden_size"),
        ("moe_ffn_hidden_size", "hidden_size"),
        TRANSPOSED,
        Shard.COLUMNS,
    ),
    _of_experts("linear_fc2.bias", "down_proj_bias", ("hidden_size",), ("hidden_size",), RENAME, Shard.NONE),
)


def read_architecture(config: Mapping[str, Any]) -> GptOssArchitecture:
    """Read a gpt-oss config.json."""
    read = ConfigReader(config)
    read.require("attention_bias", (True,), default=True)
    own = ("layer_types", "attention_bias", "experts_per_token")
    plain = {"rope_theta": 150_000.0} | {name: value for name, value in config.items() if name not in own}
    if read.get("rope_scaling") is None and read.get("rope_parameters") is None:
        plain["rope_scaling"] = _YARN
    common = dense_architecture(
        plain, model_type="gpt_oss", head_dim=64, rope_types=("yarn",), qkv_bias=True, norm_epsilon=1e-5
    )
    experts, top_k = (
        read.integer("num_local_experts", 128, most=MOST_PARTS),
        read.integer("num_experts_per_tok", 4),
    )
    if top_k > experts:
        raise read.error("num_experts_per_tok", top_k, f"at most num_local_experts, {experts}")
    common = dataclasses.replace(
        common,
        num_moe_experts=experts,
        moe_ffn_hidden_size=common.ffn_hidden_size,
        moe_router_topk=top_k,
    )
    sliding = _sliding_layers(read, common.num_layers)
    return GptOssArchitecture(
        **vars(common),
        sliding_layers=sliding,
        sliding_window=read.integer("sliding_window", 128) if sliding else None,
        swiglu_alpha=read.number("swiglu_alpha", 1.702),
        swiglu_limit=read.number("swiglu_limit", 7.0),
    )


def _sliding_layers(read: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layers with windows: as `layer_types` says, or the first, the third and so on."""
    kinds = read.get("layer_types")
    if kinds is None:
        return tuple(range(0, num_layers, 2))
    for index, kind in enumerate(kinds):
        if kind not in (_SLIDING, _FULL):
            raise read.error(f"layer_types[{index}]", kind, f"{_SLIDING!r} or {_FULL!r}")
    if len(kinds) != num_layers:
        raise read.error("layer_types", f"{len(kinds)} layers", f"num_hidden_layers, {num_layers}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)


GPT_OSS = ModelFamily(
    model_type="gpt_oss",
    rules=dense_rules(QKV_BIAS, SINKS, OUTPUT_BIAS, mlp=(ROUTER, ROUTER_BIAS, *EXPERTS)),
    architecture=read_architecture,
    layers="slime_megatron.families.gpt_oss:LAYERS",
    memory="slime_megatron.memory.families.gpt_oss:MEMORY",
    not_parallel={
        "expert_tensor": "Megatron 0.19.2 adds an expert's bias on each of the ranks that the expert is cut for"
    },
    decoder="slime_torch.families.gpt_oss:DECODER",
    not_updated={
        "sglang": "slime-sglang finds experts in SGLang's memory one by one and without biases, which are one tensor of a layer here: no "
        "update could be proven"
    },
)
