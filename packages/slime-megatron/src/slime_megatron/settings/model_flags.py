"""Megatron's flags that describe the model: config.json says the same, so they are held against it. Imports no torch or Megatron.

The reference system's scripts give some thirty of them, `MODEL_ARGS`. Here none is needed; one that is given must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime_core.errors import Problem

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture

#: A part of `moe_layer_freq`: a list of layers with experts (1) and without (0), so many times.
_PART = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")
#: Flag, dashes as underscores -> its value by the model's config.json; a flag that is not given says nothing.
DESCRIBED: Mapping[str, Callable[[Architecture], Any]] = {
    "num_layers": lambda a: a.num_layers,
    "hidden_size": lambda a: a.hidden_size,
    "ffn_hidden_size": lambda a: a.ffn_hidden_size,
    "num_attention_heads": lambda a: a.num_attention_heads,
    "group_query_attention": lambda a: a.num_query_groups < a.num_attention_heads,
    "num_query_groups": lambda a: a.num_query_groups,
    "kv_channels": lambda a: a.head_dim,
    "vocab_size": lambda a: a.vocab_size,
    "max_position_embeddings": lambda a: a.max_position_embeddings,
    "normalization": lambda a: "RMSNorm",
    "norm_epsilon": lambda a: a.norm_epsilon,
    "swiglu": lambda a: True,
    "untie_embeddings_and_output_weights": lambda a: not a.tie_word_embeddings,
    "add_qkv_bias": lambda a: a.qkv_bias,
    "qk_layernorm": lambda a: a.qk_layernorm,
    "position_embedding_type": lambda a: "rope",
    "use_rotary_position_embeddings": lambda a: True,
    "rotary_base": lambda a: a.rope_theta,
    "rotary_percent": lambda a: a.partial_rotary_factor,
    "rotary_interleaved": lambda a: a.rotary_interleaved,
    "use_rope_scaling": lambda a: a.rope_scaling is not None,
    "rope_scaling_factor": lambda a: 1.0 if a.rope_scaling is None else a.rope_scaling.factor,
    "rotary_scaling_factor": lambda a: 1.0 if a.rope_scaling is None else a.rope_scaling.factor,
    "num_experts": lambda a: a.num_moe_experts,
    "moe_layer_freq": lambda a: [int(layer in a.moe_layers) for layer in range(a.num_layers)],
    "moe_ffn_hidden_size": lambda a: a.moe_ffn_hidden_size,
    "moe_router_topk": lambda a: a.moe_router_topk,
    "moe_router_score_function": lambda a: a.moe_router_score_function,
    "moe_router_pre_softmax": lambda a: not a.moe_norm_topk_prob or a.moe_router_score_function != "softmax",
    "moe_router_num_groups": lambda a: a.moe_router_num_groups or 1,
    "moe_router_group_topk": lambda a: a.moe_router_group_topk or 1,
    "moe_router_topk_scaling_factor": lambda a: a.moe_router_topk_scaling_factor or 1.0,
    "moe_shared_expert_intermediate_size": lambda a: a.moe_shared_expert_intermediate_size,
    "moe_shared_expert_gate": lambda a: a.moe_shared_expert_gate,
    "multi_latent_attention": lambda a: False,
    "kv_lora_rank": lambda a: None,
    "q_lora_rank": lambda a: None,
    "qk_head_dim": lambda a: None,
    "qk_pos_emb_head_dim": lambda a: None,
    "v_head_dim": lambda a: None,
}
#: What is otherwise where attention is latent (MLA). Those that are None say nothing of it: Megatron's own attention of this kind
#: reads none of them.
_LATENT: Mapping[str, Callable[[Any], Any] | None] = {
    "multi_latent_attention": lambda a: True,
    "kv_lora_rank": lambda a: a.kv_lora_rank,
    "q_lora_rank": lambda a: a.q_lora_rank,
    "qk_head_dim": lambda a: a.qk_nope_head_dim,
    "qk_pos_emb_head_dim": lambda a: a.qk_rope_head_dim,
    "v_head_dim": lambda a: a.v_head_dim,
    "qk_layernorm": lambda a: True,  # of the latent vectors
    **dict.fromkeys(("kv_channels", "num_query_groups", "group_query_attention", "add_qkv_bias")),
    **dict.fromkeys(("rotary_interleaved", "rotary_percent", "rope_scaling_factor", "use_rope_scaling")),
}


def contradictions(given: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    """Yield each flag that says of the model what its config.json does not.

    Args:
        given: flag -> value, as text; True for one without a value.
        architecture: as the family reads it.
    """
    for name, value in given.items():
        if name not in DESCRIBED:
            continue
        describe: Callable[[Any], Any] | None = DESCRIBED[name]
        if hasattr(architecture, "kv_lora_rank"):
            describe = _LATENT.get(name, describe)
        if describe is None:
            continue
        wanted = describe(architecture)
        if _typed(value, wanted) != wanted:
            yield Problem(
                f"megatron.megatron_args.{name}",
                str(value),
                f"{wanted}, by the model's config.json, for a {architecture.model_type} model",
                "drop the flag: the folder says it",
            )


def _typed(value: Any, like: Any) -> Any:
    """Return a flag's value as it compares with what config.json says; itself where it cannot."""
    if isinstance(like, list):
        return _layers(value, len(like))
    if isinstance(like, bool) or like is None or isinstance(value, bool):
        return value
    try:
        return type(like)(value) if isinstance(like, str) else float(value)
    except ValueError:
        return value


def _layers(value: Any, n: int) -> Any:
    """Return for each of n layers whether it has experts: of a list, as of `[0]*3+[1]*58`, or of one layer in so many."""
    if isinstance(value, list):
        return [int(each) for each in value]
    text = str(value).replace(" ", "")
    if text.isdigit() and int(text):
        return [int(layer % int(text) == 0) for layer in range(n)]
    parts = [_PART.fullmatch(part) for part in text.split("+")]
    if not all(parts):
        return value
    return [int(x) for part in parts if part for x in part[1].split(",") * int(part[2] or 1)]
