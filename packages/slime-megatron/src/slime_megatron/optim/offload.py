"""Moving an optimizer's state, and weights, to pinned memory of the host and back, for colocation: copies of all tensors at once, one wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage
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


@dataclass(frozen=True)
class OffloadedStorage:
    """Memory of a device that was given up while the tensors in it stay as they are."""

    storage: UntypedStorage
    """Theirs, of no bytes meanwhile."""
    held: Tensor
    """What was in it, on the host, [n_bytes] uint8."""


def weights_to_host(model: Module, device: torch.device) -> list[OffloadedStorage]:
    """Give up the memory of a model's parameters and buffers on a device; `weights_to_device` takes it back.

    All views of it, as those of Megatron's buffers and of a float32 model's optimizer, see the same numbers again afterwards. Until
    then none may be read or written.
    """
    storages: dict[int, UntypedStorage] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device == device:
            storages[storage.data_ptr()] = storage
    offloaded = [OffloadedStorage(storage, _host_copy(storage)) for storage in storages.values()]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    for each in offloaded:
        each.storage.resize_(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return offloaded


def weights_to_device(offloaded: Sequence[OffloadedStorage]) -> None:
    """Undo `weights_to_host`; later work on the device's current stream sees the weights there."""
    for each in offloaded:
        each.storage.resize_(each.held.numel())
        _bytes(each.storage).copy_(each.held, non_blocking=True)


def _host_copy(storage: UntypedStorage) -> Tensor:
    source = _bytes(storage)
    copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
    return copy.copy_(source, non_blocking=True)


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor, [n_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
