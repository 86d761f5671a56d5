"""Experts by grouped matrix products: all local experts at once, over tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import SequentialMLP
from slime_models.cpu import product
from torch import Tensor

from slime_megatron.model.layers.swiglu import is_swiglu, swiglu
from slime_megatron.model.lora_math import A, B

#: torch's grouped products want rows that begin at multiples of so many bytes.
_ALIGNED_BYTES = 16


class GroupedExperts(SequentialMLP):
    """Megatron's `SequentialMLP` with its weights, names and checkpoints, and one grouped product for each of its two matrices.

    Megatron's own grouped experts need TransformerEngine. Adapters of LoRA are grouped, too. A shared activation is computed
    for the rows of all experts at once; `--recompute-modules moe_act` computes it again in the backward pass.
    """

    def forward(self, rows: Tensor, counts: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """Return what the experts make of rows, each times its gate, and no bias.

        Args:
            rows: [n, hidden_size], sorted by expert.
            counts: int64 [local experts], of each expert's rows.
            gates: float32 [n].
        """
        config = self.config
        ends = counts.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        if config.moe_apply_probs_on_input:
            rows, gates = (rows * gates[:, None]).to(rows.dtype), torch.ones_like(gates)
        mixed = self._linear("linear_fc1", rows, ends)
        if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
            again = tensor_parallel.CheckpointWithoutOutput(fp8=None)
            activated = again.checkpoint(self._activated, mixed, gates)
            output = self._linear("linear_fc2", activated, ends)
            again.discard_output_and_register_recompute(output)
            return output, None
        return self._linear("linear_fc2", self._activated(mixed, gates), ends), None

    def _activated(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """Return the activation of fc1's output [n, width], times the gates."""
        config: Any = self.config
        if not config.gated_linear_unit:
            activated: Tensor = config.activation_func(mixed) * gates[:, None]
            return activated.to(mixed.dtype)
        if is_swiglu(config):
            return swiglu(mixed, gates)
        gate, up = mixed.chunk(2, dim=-1)
        if (bound := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=bound), up.clamp(min=-bound, max=bound)
        if config.glu_linear_offset:
            up = up + config.glu_linear_offset
        activated = config.activation_func(gate) * up * gates[:, None]
        return activated.to(mixed.dtype)

    def _linear(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row times the matrix `name` of its expert, with the expert's adapter."""
        layers: list[Any] = [getattr(expert, name) for expert in self.local_experts]
        output = grouped_product(rows, [layer.weight for layer in layers], ends)
        if not hasattr(layers[0], A):
            return output
        inner = grouped_product(rows, [getattr(layer, A) for layer in layers], ends)
        added = grouped_product(inner, [getattr(layer, B) for layer in layers], ends)
        scale: float = layers[0].lora_scale
        return output + scale * added


def with_grouped_experts(mlp: partial[Any]) -> partial[Any]:
    """Return Megatron's builder of a layer's experts with `GroupedExperts` in the place of its `SequentialMLP`."""
    submodules = mlp.keywords["submodules"]
    experts = partial(GroupedExperts, **submodules.experts.keywords)
    return partial(mlp, submodules=type(submodules)(**{**vars(submodules), "experts": experts}))


def grouped_product(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return [n, out]: each row times the transpose of its group's matrix.

    Args:
        rows: [n, in], those of a group next to each other, groups in order.
        weights: [out, in] of each group, of the dtype of the rows.
        ends: int32 [groups], on the rows' device: after how many rows each group ends, n the last.
    """
    found: Tensor = _GroupedProduct.apply(rows, ends, *weights)
    return found


class _GroupedProduct(torch.autograd.Function):
    """On CUDA torch's grouped products over a stack of the matrices, which is made anew in the backward pass and never kept.

    On a CPU one product for each group, into one result: torch's own grouped product does the same there, and wants a stack.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        if rows.is_cuda:
            return _by_stack(rows, torch.stack(weights).transpose(1, 2), ends)
        return _one_by_one(rows, [weight.t() for weight in weights], ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows, of_weights = None, cast(Sequence[Tensor | None], [None] * len(weights))
        if rows.is_cuda:
            if ctx.needs_input_grad[0]:
                of_rows = _by_stack(gradient, torch.stack(weights), ends)
            if any(ctx.needs_input_grad[2:]):
                of_weights = _stack_of_gradients(gradient, rows, ends).unbind()
            return of_rows, None, *of_weights
        if ctx.needs_input_grad[0]:
            of_rows = _one_by_one(gradient, weights, ends)
        if any(ctx.needs_input_grad[2:]):
            parts = zip(*(each.split(_sizes(ends)) for each in (gradient, rows)), strict=True)
            of_weights = [product(left.t(), right) for left, right in parts]
        return of_rows, None, *of_weights


def _one_by_one(rows: Tensor, matrices: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return [n, out] of rows [n, in] and a matrix [in, out] for each group."""
    sizes = _sizes(ends)
    output = rows.new_empty(len(rows), matrices[0].size(1))
    for part, own, matrix in zip(output.split(sizes), rows.split(sizes), matrices, strict=True):
        if len(own):
            product(own, matrix, out=part)
    return output


def _sizes(ends: Tensor) -> list[int]:
    """Return how many rows each group has."""
    return [end - begin for begin, end in pairwise([0, *ends.tolist()])]


def _by_stack(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return [n, out] of rows [n, in] and matrices [groups, in, out]."""
    width, step = matrices.size(2), _ALIGNED_BYTES // rows.itemsize
    inner, outer = -rows.size(1) % step, -width % step
    if inner or outer:
        rows, matrices = F.pad(rows, (0, inner)), F.pad(matrices, (0, outer, 0, inner))
    return F.grouped_mm(rows, matrices, offs=ends)[:, :width]


def _stack_of_gradients(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return [groups, out, in]: the sum over a group's rows of gradient [n, out] times row [n, in]."""
    (_, out), (_, width), step = gradient.shape, rows.shape, _ALIGNED_BYTES // rows.itemsize
    if out % step or width % step:
        gradient, rows = F.pad(gradient, (0, -out % step)), F.pad(rows, (0, -width % step))
    found = F.grouped_mm(gradient.t(), rows, offs=ends)[:, :out, :width]
    # torch leaves what it finds in memory for a group without rows on some devices (github.com/pytorch/pytorch/issues/172439).
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return found.masked_fill_(empty[:, None, None], 0)
