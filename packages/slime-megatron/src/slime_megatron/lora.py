"""LoRA: low-rank adapters beside Megatron's linear layers, the layers themselves frozen."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from slime_core.errors import TrainerError
from torch import Tensor
from torch.nn import Module, Parameter

from slime_megatron.section_roles import LoraSection

#: Names of the adapter's two matrices, beside `weight` of their layer.
A, B = "lora_a", "lora_b"


def add_adapters(model: Module, section: LoraSection, *, seed: int) -> None:
    """Give every target layer y = W x + (alpha / rank) B A x, and freeze all but A [rank, in] and B [out, rank].

    B begins at zero, so that the model begins as it was; A is drawn uniformly within ±1/sqrt(in), by the layer's
    name and `seed`. Source: arXiv 2106.09685, section 4.1; the draw is that of Microsoft's and PEFT's code.

    Raises:
        TrainerError: no layer has the name of a target.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert section.rank is not None
    lacking = set(section.target_modules)
    for name, layer in list(model.named_modules()):
        target = name.rpartition(".")[2]
        if target in section.target_modules:
            lacking.discard(target)
            _add(
                layer, section.rank, scale=section.alpha / section.rank, seed=zlib.crc32(name.encode()) ^ seed
            )
    if lacking:
        raise TrainerError(
            f"lora.target_modules: the model has no layer named {', '.join(sorted(lacking))}; "
            "it has linear_qkv, linear_proj, linear_fc1 and linear_fc2"
        )


def _add(layer: Module, rank: int, *, scale: float, seed: int) -> None:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    bound = 1 / math.sqrt(columns)
    drawn = torch.empty(rank, columns).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    layer.register_parameter(A, Parameter(drawn.to(weight)))
    layer.register_parameter(B, Parameter(weight.new_zeros(rows, rank)))
    layer.lora_scale = scale

    def adapt(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        y, bias = output
        return y + layer.lora_scale * (inputs[0] @ layer.lora_a.t() @ layer.lora_b.t()), bias

    layer.register_forward_hook(adapt)


def clear_adapters(model: Module) -> None:
    """Set every B to zero: the model is the base again."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(f".{B}"):
                parameter.zero_()


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B)


def merged_weights(model: Module) -> Callable[[Tensor], Tensor]:
    """Return a function from a parameter to its values, its adapter merged in if it is a layer's that has one.

    W + (alpha / rank) B A is computed in float32 and rounded once. Other values are the model's own.
    """
    layers: dict[int, Any] = {id(layer.weight): layer for layer in model.modules() if hasattr(layer, A)}

    def merged(parameter: Tensor) -> Tensor:
        layer = layers.get(id(parameter))
        if layer is None:
            return parameter.detach()
        return merge(parameter.detach(), layer.lora_a.detach(), layer.lora_b.detach(), layer.lora_scale)

    return merged


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, computed in float32, in the weight's dtype."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)
