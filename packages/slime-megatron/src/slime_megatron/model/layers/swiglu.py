"""SwiGLU that keeps its input alone for the backward pass, and Megatron's MLPs with it."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.triton_launch import can_launch
from torch import Tensor


def swiglu(mixed: Tensor, gates: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, times the gates of rows where there are any: [..., width] in the dtype of `mixed`.

    Keeps its arguments for the backward pass, where autograd would keep the silu and, of Megatron's formula, a copy of `up`, too.

    Args:
        mixed: [..., 2 width], whose halves are gate and up.
        gates: float32 [n] of the rows of mixed [n, 2 width].
    """
    return cast(Tensor, _SwiGLU.apply(mixed, gates))


def is_swiglu(config: TransformerConfig) -> bool:
    """Return whether a model's activation is the one that `swiglu` computes: not clamped, without an offset."""
    fields: Any = config
    return (
        fields.gated_linear_unit
        and fields.activation_func is F.silu
        and not fields.glu_linear_offset
        and fields.activation_func_clamp_value is None
    )


class SwiGLUMLP(MLP):
    """Megatron's MLP, with `swiglu` in the place of its own formula."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias that is still to be added or None) of hidden states [t, 1, hidden_size]."""
        config: Any = self.config
        is_fused = config.bias_activation_fusion or config.use_te_activation_func
        if per_token_scale is not None or is_fused or not is_swiglu(config):
            found: tuple[Tensor, Tensor | None] = super().forward(hidden_states, per_token_scale, **options)
            return found
        mixed, bias = self.linear_fc1(hidden_states)
        output: tuple[Tensor, Tensor | None] = self.linear_fc2(
            swiglu(mixed if bias is None else mixed + bias)
        )
        return output


class SwiGLUSharedExperts(SharedExpertMLP, SwiGLUMLP):
    """Megatron's shared experts, with `swiglu`."""


def with_swiglu(mlp: partial[Any]) -> partial[Any]:
    """Return Megatron's builder of a dense layer's MLP, which builds `SwiGLUMLP`."""
    return partial(SwiGLUMLP.as_mlp_submodule, **mlp.keywords)


def with_swiglu_in_shared_experts(mlp: partial[Any]) -> partial[Any]:
    """Return Megatron's builder of a layer's experts, with `SwiGLUSharedExperts` in the place of its shared ones."""
    submodules = mlp.keywords["submodules"]
    shared = partial(_shared_experts, **submodules.shared_experts.keywords)
    changed = type(submodules)(**{**vars(submodules), "shared_experts": shared})
    return partial(mlp, submodules=changed)


def _shared_experts(*, submodules: Any, **arguments: Any) -> SwiGLUSharedExperts:
    """Build shared experts as Megatron does."""
    return SwiGLUSharedExperts(submodules=submodules, **arguments)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, gates: Tensor | None) -> Tensor:
        ctx.save_for_backward(mixed, gates)
        if gates is None and can_launch(mixed.device):
            from slime_models import swiglu as kernels

            rows = mixed.contiguous().flatten(0, -2)
            return cast(Tensor, kernels.swiglu(rows)).view(*mixed.shape[:-1], -1)
        gate, up = mixed.chunk(2, dim=-1)
        product = F.silu(gate).mul_(up)
        return product if gates is None else product.mul_(gates[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed, gates = ctx.saved_tensors
        if gates is None and can_launch(mixed.device):
            from slime_models import swiglu as kernels

            rows = (each.contiguous().flatten(0, -2) for each in (mixed, gradient))
            return cast(Tensor, kernels.swiglu_backward(*rows)).view(mixed.shape), None
        gate, up = mixed.chunk(2, dim=-1)
        found = torch.empty_like(mixed)
        of_gate, of_up = found.chunk(2, dim=-1)
        scaled = gradient if gates is None else (gradient * gates[:, None]).to(mixed.dtype)
        activated = F.silu(gate)
        torch.mul(scaled, activated, out=of_up)
        of_gates = None
        if gates is not None:
            of_gates = (activated.mul_(up) * gradient).sum(-1, dtype=gates.dtype)
        del activated
        torch.ops.aten.silu_backward.grad_input(scaled * up, gate, grad_input=of_gate)
        return found, of_gates
