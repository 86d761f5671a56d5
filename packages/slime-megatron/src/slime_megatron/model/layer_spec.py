"""Layer specifications: linear layers of Megatron or TransformerEngine, with our attention, norms and routers."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from slime_core.errors import TrainerError
from slime_models.family.architecture import Architecture

from slime_megatron.model.layers.attention import PackedAttention
from slime_megatron.model.layers.experts import with_grouped_experts
from slime_megatron.model.layers.local_experts import with_local_experts
from slime_megatron.model.layers.norm import RMSNorm
from slime_megatron.model.layers.router import RoutedLayer, with_router
from slime_megatron.model.layers.sandwich import SandwichLayer
from slime_megatron.model.layers.swiglu import with_swiglu, with_swiglu_in_shared_experts
from slime_megatron.model.transformer_config import has_experts


def layer_spec(config: TransformerConfig, architecture: Architecture, layer: int = 0) -> ModuleSpec:
    """Return one decoder layer, `layer` of the whole model, from 0, with all that `Architecture` has a field for.

    Needs neither TransformerEngine nor Apex, unless `transformer_impl` is `transformer_engine`.

    Raises:
        TrainerError: TransformerEngine is asked for, and not there; or the layer has both experts and norms after them.
    """
    experts = config.num_moe_experts if has_experts(config, layer) else None
    submodules = get_gpt_layer_local_submodules(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.transformer_impl == "transformer_engine":
        _take_transformer_engine(submodules, config, dense=experts is None)
    if experts is None:
        submodules.mlp = with_swiglu(submodules.mlp)
        module = SandwichLayer if architecture.post_layernorms else TransformerLayer
        return ModuleSpec(module=module, submodules=submodules)
    if architecture.post_layernorms:
        raise TrainerError(
            f"{architecture.model_type}: layer {layer} has experts and norms after attention and MLP; wanted one of them: "
            "both are not implemented"
        )
    submodules.mlp = with_swiglu_in_shared_experts(with_local_experts(with_router(submodules.mlp)))
    if config.moe_grouped_gemm:
        submodules.mlp = with_grouped_experts(submodules.mlp)
    return ModuleSpec(module=RoutedLayer, submodules=submodules)


def _take_transformer_engine(
    layer: TransformerLayerSubmodules, config: TransformerConfig, *, dense: bool
) -> None:
    """Put TransformerEngine's linear layers and norms in a layer; names and shapes of its weights stay.

    Attention is ours, which knows of shared tokens, and experts stay Megatron's own.
    """
    if not (torch.cuda.is_available() and find_spec("transformer_engine")):
        raise TrainerError(
            "--transformer-impl transformer_engine: found no CUDA device, or TransformerEngine is not installed; wanted "
            "both; install it, or drop the flag"
        )
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )

    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    attention = layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = TEColumnParallelLinear, TERowParallelLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TENorm
    if dense:
        matrices = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
        layer.mlp = partial(MLP.as_mlp_submodule, submodules=matrices)
