"""The layers of gpt-oss: attention with sinks and windows, experts with a clamped SwiGLU and biases. Imported when a model is built."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from slime_models.family.families.gpt_oss import GptOssArchitecture
from torch import Tensor

from slime_megatron.batch.trees.flops import forward_flops as all_pairs_flops
from slime_megatron.batch.trees.flops import pairs_before_window
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.layer_spec import layer_spec
from slime_megatron.model.layers.attention import PackedAttention


class SinkAttention(PackedAttention):
    """Attention whose softmax has one entry more for each head, the sink."""

    sinks: torch.nn.Parameter

    def __init__(self, config: TransformerConfig, *args: Any, **given: Any) -> None:
        super().__init__(config, *args, **given)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks as checkpoints hold them: heads are cut by tensor parallelism."""
        groups = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        return make_sharded_tensors_for_checkpoint(
            {"sinks": self.sinks}, prefix, {"sinks": 0}, sharded_offsets, **groups
        )


def gpt_oss_layer(config: TransformerConfig, architecture: GptOssArchitecture, number: int) -> ModuleSpec:
    """Return slime's layer with sinks, and a window where the layer has one."""
    spec = layer_spec(config, architecture, number)
    window = architecture.sliding_window if number in architecture.sliding_layers else None
    spec.submodules.self_attention.submodules.core_attention = partial(SinkAttention, window=window)
    return spec


def gpt_oss_config(architecture: GptOssArchitecture) -> dict[str, Any]:
    """Return what Megatron's configuration has otherwise."""
    return {
        "add_bias_linear": True,
        "activation_func": partial(_swish, gain=architecture.swiglu_alpha),
        "activation_func_clamp_value": architecture.swiglu_limit,
        "glu_linear_offset": 1.0,
    }


def _swish(x: Tensor, *, gain: float) -> Tensor:
    return x * torch.sigmoid(gain * x)


def add_biases(model: GPTModel, _: GptOssArchitecture) -> None:
    """Let the bias of each expert's second matrix be added to a tensor of its own, and its gradients to those of the same expert.

    Megatron 0.19.2 adds it in place to a view, which autograd refuses, and adds its gradients up over tensor-parallel ranks that have
    other experts, under sequence parallelism.
    """
    for experts in (each for each in model.modules() if isinstance(each, SequentialMLP)):
        for expert in experts.local_experts:
            expert.linear_fc1.bias.sequence_parallel = expert.linear_fc2.bias.sequence_parallel = False
            expert.linear_fc2.register_forward_hook(lambda _, __, output: (output[0], None))
            expert.register_forward_hook(_add_bias)


def _add_bias(expert: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """Return the output of an expert with the bias of its second matrix, times the gates of its tokens."""
    return output[0] + (inputs[1][:, None] * expert.linear_fc2.bias).type_as(output[0]), None


def gpt_oss_flops(architecture: GptOssArchitecture, tree: TokenTree) -> int:
    """Return the FLOPs of a tree's forward pass, without what windows hide."""
    if architecture.sliding_window is None:
        return all_pairs_flops(architecture, tree)
    hidden = pairs_before_window(tree, architecture.sliding_window)
    each = 4 * architecture.query_size * len(architecture.sliding_layers)
    return all_pairs_flops(architecture, tree) - each * hidden


LAYERS = FamilyLayers(
    layer=gpt_oss_layer, config=gpt_oss_config, finish=add_biases, forward_flops=gpt_oss_flops
)
