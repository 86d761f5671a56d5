"""Moving an optimizer's state to pinned memory of the host and back, for colocation: copies of all tensors at once, one wait."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Module

from slime_megatron.optim.first_state import inner_optimizers


def to_host(optimizer: MegatronOptimizer, model: Module) -> list[Tensor]:
    """Move master weights and moments to the host, and return them: they are the same tensors, and `to_device` moves them back.

    What is the model's own memory stays: master weights that are float32 weights themselves. So does what is on the host
    already. (Megatron 0.19.2 would move either, and give the first memory of its own.)
    """
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    moved = [
        tensor
        for tensor in _tensors(optimizer)
        if tensor.is_cuda and tensor.untyped_storage().data_ptr() not in kept
    ]
    copies = [
        torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)
        for tensor in moved
    ]
    torch.cuda.current_stream().synchronize()
    for tensor, copy in zip(moved, copies, strict=True):
        tensor.data = copy
    torch.cuda.empty_cache()
    return moved


def to_device(moved: list[Tensor]) -> None:
    """Undo `to_host`; later work on the device's current stream sees the tensors there."""
    for tensor in moved:
        tensor.data = tensor.data.to("cuda", non_blocking=True)


def _tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the parameters of torch's optimizers, and their state, each tensor once."""
    seen = set()
    for each in inner_optimizers(optimizer):
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        for tensor in (*parameters, *(value for state in each.state.values() for value in state.values())):
            if isinstance(tensor, Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
