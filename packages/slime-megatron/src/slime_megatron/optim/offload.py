"""Moving an optimizer's state, and weights, to pinned memory of the host and back, for colocation: copies of all at once, one wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage
from torch.nn import Module

from slime_megatron.optim.first_state import inner_optimizers


@dataclass(frozen=True)
class OffloadedStorage:
    """Memory of a device that was given up while the tensors in it stay as they are."""

    storage: UntypedStorage
    """Theirs, of no bytes meanwhile."""
    held: Tensor
    """What was in it, on the host, [n_bytes] uint8."""


def to_host(
    tensors: Iterable[Tensor], device: torch.device, *, but: Iterable[Tensor] = ()
) -> list[OffloadedStorage]:
    """Give up the memory of tensors that are on a device; `to_device` takes it back.

    All views of it, such as those of Megatron's buffers, see the same numbers again afterwards. Until then none may be read or
    written. (Megatron 0.19.2 would move a float32 weight apart from its master weight, which is the same memory.)

    Args:
        tensors: whose memory is given up, once for all that share it.
        device: memory elsewhere stays.
        but: tensors whose memory stays, too.
    """
    kept = {tensor.untyped_storage().data_ptr() for tensor in but}
    storages: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device == device and storage.data_ptr() not in kept:
            storages[storage.data_ptr()] = storage
    offloaded = [OffloadedStorage(storage, _host_copy(storage)) for storage in storages.values()]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    for each in offloaded:
        each.storage.resize_(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return offloaded


def to_device(offloaded: Sequence[OffloadedStorage]) -> None:
    """Undo `to_host`; later work on the device's current stream sees the numbers there."""
    for each in offloaded:
        each.storage.resize_(each.held.numel())
        _bytes(each.storage).copy_(each.held, non_blocking=True)


def weights_of(model: Module) -> Iterator[Tensor]:
    """Yield a model's parameters and buffers; not of Megatron's wrapper, which has `buffers` of its own."""
    yield from model.parameters()
    yield from model.buffers()


def state_of(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield master weights and moments: the parameters of torch's optimizers, and their state."""
    for each in inner_optimizers(optimizer):
        for group in each.param_groups:
            yield from group["params"]
        for state in each.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _host_copy(storage: UntypedStorage) -> Tensor:
    source = _bytes(storage)
    copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
    return copy.copy_(source, non_blocking=True)


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor, [n_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
