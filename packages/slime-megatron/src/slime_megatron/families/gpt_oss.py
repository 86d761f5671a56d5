"""The layers of gpt-oss: attention with sinks and windows, experts with a clamped SwiGLU and biases. Imported when a model is built."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from slime_models.family.families.gpt_oss import GptOssArchitecture
from torch import Tensor

from slime_megatron.batch.flops import forward_flops as all_pairs_flops
from slime_megatron.batch.flops import pairs_before_window
from slime_megatron.batch.prompt_groups import PromptGroup
from slime_megatron.model.attention import PackedAttention
from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.layer_spec import layer_spec

#: Columns that queries, keys and values get for the sink; a multiple of 8, as kernels on CUDA want it.
_EXTRA = 8


class SinkAttention(PackedAttention):
    """Attention whose softmax has one entry more for each head, the sink, whose value is zero.

    The sink is a key before all others, with a dimension of its own in which queries have the logit: so kernels that know of no
    sinks compute it, and its gradient. The parameter has the name that Megatron's own attention gives it.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **given: Any) -> None:
        super().__init__(config, softmax_scale or config.kv_channels**-0.5, **given)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [b * l, heads * head_dim] of q [b, l, heads, head_dim] and k, v [b, m, groups, head_dim], m >= l."""
        heads, dim = q.shape[2:]
        logits = (self.softmax_offset / self._scale).to(q.dtype)[:, None].expand(*q.shape[:-1], 1)
        q = torch.cat((q, F.pad(logits, (0, _EXTRA - 1))), dim=-1)
        k, v = (F.pad(x, (0, _EXTRA, 0, 0, 1, 0)) for x in (k, v))
        sink = torch.zeros_like(k[:1, :1, :1])
        sink[..., dim] = 1
        k = torch.cat((sink.expand_as(k[:, :1]), k[:, 1:]), dim=1)
        return super().attend(q, k, v).unflatten(-1, (heads, dim + _EXTRA))[..., :dim].flatten(-2)

    def _mask(self, n_query: int, n_key: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments that hide later tokens, and those before the window; the first key is the sink."""
        if self._window is None or n_key - 1 <= self._window:
            return super()._mask(n_query, n_key, device)
        mask = super()._mask(n_query, n_key - 1, device)["attn_mask"]
        return {"attn_mask": F.pad(mask, (1, 0), value=True)}

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks as checkpoints hold them: heads are cut by tensor parallelism."""
        groups = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state = {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups
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


def _add_bias(
    expert: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, None]
) -> tuple[Tensor, None]:
    """Return the output of an expert with the bias of its second matrix, times the gates of its tokens."""
    return output[0] + (inputs[1][:, None] * expert.linear_fc2.bias).type_as(output[0]), None


def gpt_oss_flops(architecture: GptOssArchitecture, group: PromptGroup) -> int:
    """Return the FLOPs of a prompt group's forward pass, without what windows hide."""
    if architecture.sliding_window is None:
        return all_pairs_flops(architecture, group)
    hidden = pairs_before_window(group, architecture.sliding_window)
    each = 4 * architecture.query_size * len(architecture.sliding_layers)
    return all_pairs_flops(architecture, group) - each * hidden


LAYERS = FamilyLayers(
    layer=gpt_oss_layer, config=gpt_oss_config, finish=add_biases, forward_flops=gpt_oss_flops
)
