"""What DeepSeek-V3.2 and GLM-5 share: latent attention to the tokens that an indexer chooses.

The indexer rates all earlier tokens of each token by products of its own, and attention sees the best `index_topk` of them. It has
no gradient: it stays as the folder has it. Source: DeepSeek-V3.2-Exp, section 2.1; transformers 5.19, `deepseek_v32`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_models.family.architecture import ConfigReader
from slime_models.family.families.glm4_moe import with_shared_experts
from slime_models.family.families.latent_attention.rules import (
    LatentArchitecture,
    dense_layers,
    latent_architecture,
    latent_rules,
    require_deepseek_router,
)
from slime_models.family.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT
from slime_models.family.rules import Dims, Rule, mtp_rules, rename

#: What `layer_types` of config.json calls such a layer: transformers 5.19, and 5.17.
_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
_MEGATRON, _HF = "decoder.layers.{layer}.self_attention.indexer.", "model.layers.{layer}.self_attn.indexer."
#: `FamilyLayers` of the trainer.
LAYERS = "slime_megatron.families.sparse_layers:LAYERS"
#: `FamilyMemory` of the trainer.
MEMORY = "slime_megatron.memory.families.sparse:MEMORY"
NOT_SERVED = {
    "sglang": "SGLang 0.5.23 has the indexer's kernels for GPUs alone, where nobody has tried it",
}


@dataclass(frozen=True, kw_only=True)
class SparseArchitecture(LatentArchitecture):
    """A decoder whose latent attention sees what an indexer chooses."""

    index_topk: int
    """Tokens that each token sees, at most."""
    index_n_heads: int
    """Heads of the indexer's queries; its keys have one."""
    index_head_dim: int
    """Width of each; the first `qk_rope_head_dim` dimensions are rotated."""
    index_interleaved: bool
    """Rotated dimensions of the indexer are pairs of neighbours, and not of both halves."""

    @property
    def index_query_size(self) -> int:
        """Rows of the indexer's projection to queries."""
        return self.index_n_heads * self.index_head_dim

    @property
    def attention_size(self) -> int:
        """Numbers in the matrices of a layer's attention, the indexer's among them."""
        queries = (self.q_lora_rank or 0) * self.index_query_size
        return (
            super().attention_size + queries + self.hidden_size * (self.index_head_dim + self.index_n_heads)
        )


def _indexer(name: str, dims: Dims) -> Rule:
    return rename(_MEGATRON + name, _HF + name, dims, frozen=True)


_DECODER = latent_rules(
    _indexer("wq_b.weight", ("index_query_size", "q_lora_rank")),
    _indexer("wk.weight", ("index_head_dim", "hidden_size")),
    _indexer("k_norm.weight", ("index_head_dim",)),
    _indexer("k_norm.bias", ("index_head_dim",)),
    _indexer("weights_proj.weight", ("index_n_heads", "hidden_size")),
)
#: MTP layers are numbered after the decoder's, and have an indexer of their own.
RULES = (*_DECODER, *mtp_rules(_DECODER))
COPIES = {"embed_tokens.weight": EMBEDDING_WEIGHT, "shared_head.head.weight": OUTPUT_WEIGHT}


def sparse_architecture(
    config: Mapping[str, Any],
    *,
    model_type: str,
    defaults: Mapping[str, int],
    norm_epsilon: float,
    index_interleaved: bool,
) -> SparseArchitecture:
    """Read a config.json; see `latent_architecture`. Latent queries are wanted: the indexer is made of them."""
    read = ConfigReader(config)
    require_deepseek_router(read)
    plain = {name: value for name, value in config.items() if name != "layer_types"}
    for index, kind in enumerate(read.get("layer_types") or ()):
        if kind not in _LAYER_TYPES:
            words = " or ".join(map(repr, _LAYER_TYPES))
            raise read.error(f"layer_types[{index}]", kind, f"{words}: nothing else is implemented")
    read.require("rope_interleave", (True,), default=True)
    if "q_lora_rank" in config:
        read.integer("q_lora_rank")
    common = latent_architecture(plain, model_type=model_type, defaults=defaults, norm_epsilon=norm_epsilon)
    sizes: dict[str, Any] = {
        name: read.integer(name, defaults[name]) for name in ("index_topk", "index_n_heads", "index_head_dim")
    }
    if sizes["index_head_dim"] < common.qk_rope_head_dim:
        raise read.error(
            "index_head_dim", sizes["index_head_dim"], f"at least qk_rope_head_dim, {common.qk_rope_head_dim}"
        )
    sparse = SparseArchitecture(**vars(common), **sizes, index_interleaved=index_interleaved)
    found = with_shared_experts(
        sparse,
        read,
        dense_layers=dense_layers(read, common.num_layers, default=3),
        defaults=defaults,
        scaling=2.5,
    )
    assert isinstance(found, SparseArchitecture)
    return found
