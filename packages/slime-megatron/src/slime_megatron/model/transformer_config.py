"""From a model's architecture and our settings to Megatron's `TransformerConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.architecture import Architecture

from slime_megatron.settings.megatron_flags import with_flags
from slime_megatron.settings.model_flags import DESCRIBED
from slime_megatron.settings.section import MegatronSection

#: Flag that may only say what the folder does; Megatron would build the layers with it, and compute its own loss.
MTP_NUM_LAYERS = "mtp_num_layers"
#: What Megatron's own flags may change; all else follows from the model or from slime's settings.
_DEFAULTS = frozenset(
    {
        "moe_token_dispatcher_type",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
        "recompute_method",
        "recompute_num_layers",
        "transformer_impl",
    }
)


def transformer_config(
    architecture: Architecture,
    section: MegatronSection,
    *,
    dtype: torch.dtype,
    own: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Return the configuration of a decoder of this architecture.

    `calculate_per_token_loss` makes Megatron add gradients up over micro-batches and ranks without dividing by
    their numbers: the weights of a `TokenView` already are shares of the whole step.

    Args:
        architecture: of the model.
        section: how it is parallelised.
        dtype: of its parameters.
        own: fields that the family's layers want otherwise.

    Raises:
        TrainerError: one of Megatron's own flags contradicts what is derived here; names both.
    """
    fields: dict[str, Any] = dict(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_layernorm,
        rotary_interleaved=architecture.rotary_interleaved,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default one refuses variable_seq_lengths, experts or not
        transformer_impl="local",
        # Every weight is loaded, so none is drawn; and none of the fused kernels exists without TransformerEngine.
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        recompute_granularity=section.recompute_granularity,
        recompute_method="uniform" if section.recompute_granularity == "full" else None,
        recompute_num_layers=1 if section.recompute_granularity == "full" else None,
        tensor_model_parallel_size=section.tensor_model_parallel_size,
        pipeline_model_parallel_size=section.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=section.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=section.decoder_last_pipeline_num_layers,
        context_parallel_size=section.context_parallel_size,
        expert_model_parallel_size=section.expert_model_parallel_size,
        expert_tensor_parallel_size=section.expert_tensor_parallel_size,
        sequence_parallel=section.sequence_parallel,
        batch_p2p_comm=torch.cuda.is_available(),  # gloo sends one by one
        **_experts(architecture, section),
    )
    fields |= own or {}
    # Only Megatron's experts one after another add biases.
    fields["moe_grouped_gemm"] = architecture.num_moe_experts is not None and not fields["add_bias_linear"]
    ours = partial(TransformerConfig, **fields)
    others = {MTP_NUM_LAYERS, *DESCRIBED}
    flags = {name: value for name, value in section.megatron_args.items() if name not in others}
    return with_flags(ours, flags, "transformer", defaults=_DEFAULTS)


def _experts(architecture: Architecture, section: MegatronSection) -> dict[str, Any]:
    """Return the fields that a model with experts has."""
    if architecture.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": architecture.num_moe_experts,
        "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
        "moe_router_topk": architecture.moe_router_topk,
        "moe_router_pre_softmax": not architecture.moe_norm_topk_prob,
        "moe_layer_freq": _layers_with_experts(architecture),
        "moe_router_score_function": architecture.moe_router_score_function,
        "moe_router_enable_expert_bias": architecture.moe_router_enable_expert_bias,
        "moe_router_num_groups": architecture.moe_router_num_groups,
        "moe_router_group_topk": architecture.moe_router_group_topk,
        "moe_router_topk_scaling_factor": architecture.moe_router_topk_scaling_factor,
        "moe_shared_expert_intermediate_size": architecture.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": architecture.moe_shared_expert_gate,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",  # Megatron's own; without a coefficient it is none
        "moe_aux_loss_coeff": 0.0,
        "moe_enable_routing_replay": section.use_routing_replay or section.use_rollout_routing_replay,
    }


def _layers_with_experts(architecture: Architecture) -> int | list[int]:
    """Return Megatron's `moe_layer_freq`: 1 where all have them, else 0 or 1 for each layer.

    With a list, checkpoints name each layer by itself.
    """
    if not architecture.dense_layers:
        return 1
    return [int(layer in architecture.moe_layers) for layer in range(architecture.num_layers)]


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return whether a layer of the whole model, from 0, has experts."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        return False
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])
