"""What the families of multi-head latent attention (MLA) share: rules of their weights, and the fields of config.json.

Keys and values of a token are made of one latent vector (`kv_lora_rank` numbers, normed) and one rotated key that all heads
share; queries are made of a latent vector of their own, or of the hidden state. Source: arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader, RopeScaling
from slime_models.family.families.dense import (
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    GATE_UP,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT,
    dense_architecture,
)
from slime_models.family.families.glm4_moe import EXPERT_BIAS, SHARED_DOWN, SHARED_GATE_UP, first_layers
from slime_models.family.families.qwen3_moe import EXPERT_DOWN, EXPERT_GATE_UP, ROUTER
from slime_models.family.rules import Dims, Rule, Shard, rename
from slime_models.family.yarn import YarnScaling, yarn_entropy

_MEGATRON, _HF = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
#: `FamilyLayers` of the trainer.
LAYERS = "slime_megatron.families.latent_layers:LAYERS"
#: `FamilyMemory` of the trainer.
MEMORY = "slime_megatron.memory.families.latent:MEMORY"
#: `FamilyDecoder` of the engine `torch`.
DECODER = "slime_torch.model.latent_decoder:DECODER"
#: Epsilon of the norms of latent vectors: transformers and DeepSeek's own code do not take that of the other norms.
_LATENT_NORM_EPSILON = 1e-6
#: Fields of config.json that are read here and not by `dense_architecture`.
_OWN = ("head_dim", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, kw_only=True)
class LatentArchitecture(Architecture):
    """A decoder whose attention is latent. `head_dim` is the width of a head's query and key."""

    q_lora_rank: int | None
    """Width of the latent vector of queries; None where they are made of the hidden state."""
    kv_lora_rank: int
    """Width of the latent vector of keys and values."""
    qk_nope_head_dim: int
    """Dimensions of a query's and key's head that are not rotated, the first ones."""
    qk_rope_head_dim: int
    """Those that are rotated; of keys all heads share them."""
    v_head_dim: int
    """Width of a value's head."""
    latent_norm_epsilon: float = _LATENT_NORM_EPSILON
    """Epsilon of the norms of latent vectors."""
    score_factor: float = 1.0
    """Multiplies the scale of attention scores: more than 1 where `rope_scaling` weighs all dimensions (`mscale_all_dim`)."""

    @property
    def latent_size(self) -> int:
        """Numbers that a token's keys and values of a layer are made of: what a cache needs to hold."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def cache_size(self, n_ranks: int) -> int:
        """Return the numbers that a rank keeps of a token: the latent vector and the rotated key, which all heads share."""
        return self.latent_size

    @property
    def latent_query_size(self) -> int:
        """Rows of the projection to all heads' queries: `query_size`, which config.json spells otherwise here."""
        return self.query_size

    @property
    def expanded_size(self) -> int:
        """Rows of the projection from the latent vector to all heads' unrotated keys and values."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def value_size(self) -> int:
        """Columns of the output projection."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def attention_size(self) -> int:
        """Numbers in the matrices of a layer's attention."""
        queries = self.hidden_size * self.query_size
        if self.q_lora_rank is not None:
            queries = self.q_lora_rank * (self.hidden_size + self.query_size)
        rest = (
            self.hidden_size * (self.latent_size + self.value_size) + self.kv_lora_rank * self.expanded_size
        )
        return queries + rest

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.score_factor * math.pow(self.head_dim, -0.5)


def _has_query_latent(architecture: Architecture) -> bool:
    return isinstance(architecture, LatentArchitecture) and architecture.q_lora_rank is not None


def _lacks_query_latent(architecture: Architecture) -> bool:
    return not _has_query_latent(architecture)


def _attention(
    megatron: str,
    hf: str,
    dims: Dims,
    shard: Shard = Shard.NONE,
    when: Callable[[Architecture], bool] | None = None,
) -> Rule:
    names = f"{_MEGATRON}{megatron}.weight", f"{_HF}{hf}.weight"
    return rename(*names, dims, shard=shard) if when is None else rename(*names, dims, shard=shard, when=when)


#: Attention: heads are cut by tensor parallelism, and every rank holds the projections to latent vectors.
ATTENTION = (
    _attention(
        "linear_q_proj", "q_proj", ("latent_query_size", "hidden_size"), Shard.ROWS, _lacks_query_latent
    ),
    _attention("linear_q_down_proj", "q_a_proj", ("q_lora_rank", "hidden_size"), when=_has_query_latent),
    _attention("q_layernorm", "q_a_layernorm", ("q_lora_rank",), when=_has_query_latent),
    _attention(
        "linear_q_up_proj", "q_b_proj", ("latent_query_size", "q_lora_rank"), Shard.ROWS, _has_query_latent
    ),
    _attention("linear_kv_down_proj", "kv_a_proj_with_mqa", ("latent_size", "hidden_size")),
    _attention("kv_layernorm", "kv_a_layernorm", ("kv_lora_rank",)),
    _attention("linear_kv_up_proj", "kv_b_proj", ("expanded_size", "kv_lora_rank"), Shard.ROWS),
    _attention("linear_proj", "o_proj", ("hidden_size", "value_size"), Shard.COLUMNS),
)


def latent_rules(*attention: Rule) -> tuple[Rule, ...]:
    """Return the table of a decoder of dense layers and layers with experts; `attention` is what it has besides `ATTENTION`."""
    mlp = (GATE_UP, DOWN, ROUTER, EXPERT_BIAS, SHARED_GATE_UP, SHARED_DOWN, EXPERT_GATE_UP, EXPERT_DOWN)
    return (EMBEDDING, INPUT_NORM, *ATTENTION, *attention, MLP_NORM, *mlp, FINAL_NORM, OUTPUT)


def latent_architecture(
    config: Mapping[str, Any],
    *,
    model_type: str,
    defaults: Mapping[str, int | None],
    norm_epsilon: float = 1e-6,
) -> LatentArchitecture:
    """Read what a config.json says outside of experts.

    Args:
        config: the parsed file.
        model_type: the family's; the file must say the same.
        defaults: sizes that a file that does not say means, by field.
        norm_epsilon: the same.

    Raises:
        DataError: names the field that is missing, wrong, or asks for what is not implemented.
    """
    read = ConfigReader(config)
    read.require("attention_dropout", (0, 0.0), default=0)
    sizes: dict[str, Any] = {
        name: read.integer(name, defaults[name])
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    if sizes["qk_rope_head_dim"] % 2:
        raise read.error("qk_rope_head_dim", sizes["qk_rope_head_dim"], "an even number: pairs are rotated")
    query_rank = config.get("q_lora_rank", defaults["q_lora_rank"])
    read.partial_rotary_factor(1.0)
    theta, scaling = read.rope(("yarn",))
    plain = {name: value for name, value in config.items() if name not in _OWN}
    plain |= {"head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], "rope_theta": theta}
    common = dense_architecture(plain, model_type=model_type, norm_epsilon=norm_epsilon)
    if common.num_query_groups != common.num_attention_heads:
        raise read.error(
            "num_key_value_heads",
            common.num_query_groups,
            f"num_attention_heads, {common.num_attention_heads}: every head has keys of its own",
        )
    common = dataclasses.replace(
        common, rope_scaling=scaling, rotary_interleaved=read.flag("rope_interleave", default=True)
    )
    return LatentArchitecture(
        **vars(common),
        **sizes,
        q_lora_rank=None if query_rank is None else read.integer("q_lora_rank", defaults["q_lora_rank"]),
        score_factor=_score_factor(read, scaling),
    )


def require_deepseek_router(read: ConfigReader) -> None:
    """Refuse what DeepSeek's own code calls other routers than those of DeepSeek-V3."""
    for field, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        read.require(field, (only,), default=only)


def dense_layers(read: ConfigReader, num_layers: int, *, default: int) -> tuple[int, ...]:
    """Return the layers without experts: as `mlp_layer_types` says, else the first ones, by `first_k_dense_replace`."""
    kinds = read.get("mlp_layer_types")
    if kinds is None:
        return first_layers(read, num_layers, default=default)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise read.error("mlp_layer_types", kinds, f"a list of num_hidden_layers, {num_layers}, kinds")
    for index, kind in enumerate(kinds):
        if kind not in ("dense", "sparse"):
            raise read.error(f"mlp_layer_types[{index}]", kind, "'dense' or 'sparse'")
    found = tuple(index for index, kind in enumerate(kinds) if kind == "dense")
    if len(found) == num_layers:
        raise read.error("mlp_layer_types", kinds, "a 'sparse' layer among them")
    if (
        read.get("first_k_dense_replace") is not None
        and first_layers(read, num_layers, default=default) != found
    ):
        raise read.error(
            "first_k_dense_replace", read.get("first_k_dense_replace"), f"what mlp_layer_types says: {kinds}"
        )
    return found


def _score_factor(read: ConfigReader, scaling: RopeScaling | YarnScaling | None) -> float:
    table = read.rope_table()
    if table is None or not isinstance(scaling, YarnScaling) or not table.get("mscale_all_dim"):
        return 1.0
    return yarn_entropy(scaling.factor, table.number("mscale_all_dim")) ** 2
