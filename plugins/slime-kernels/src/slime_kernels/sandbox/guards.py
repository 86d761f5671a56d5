"""`Guards`: memory around the tensors of a candidate that is compared after its kernels have run.

On a device nothing checks addresses, and what lies behind a tensor is valid memory, as a rule. Here each tensor lies between two guards.
What writes into one is found, bit for bit. What reads from one gets numbers that no answer is made of: NaN, the largest and the
smallest by turns, as NaN is lost in a maximum and cancels no product with 0. So reading is found where it changes the answer, and not
where a kernel drops what it read. Not found is what goes further beyond than a guard is long, and what goes beyond a tensor that lies
inside a larger one of the candidate. Tensors that a candidate makes while its module is imported have no guards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack

from slime_kernels.sandbox.launch_memory import BoundsError
from slime_kernels.sandbox.values import tensors_of

#: Bytes of a guard: so many times those of the tensor, as a block may overhang by rows of it, between a least and a most. All are multiples of
#: what allocators align to, so that a tensor is aligned as it would be without.
_TIMES, _LEAST, _MOST, _ALIGNED = 16, 256 << 10, 4 << 20, 512
#: Bits of a type: a NaN with room for a number of 6 bits, and its largest number.
_FLOATS = {
    torch.float16: (0x7E00, 0x7BFF),
    torch.bfloat16: (0x7FC0, 0x7F7F),
    torch.float32: (0x7FC00000, 0x7F7FFFFF),
    torch.float64: (0x7FF8 << 48, (0x7FF0 << 48) - 1),
}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_N_PATTERNS = 61


@dataclass(frozen=True)
class _Block:
    before: Tensor
    after: Tensor
    """Guards, as whole numbers of the size of the tensor's elements."""
    pattern: Tensor
    """What is in them, four numbers again and again."""
    storage: StorageWeakRef
    """Of what lies between them."""

    def is_whole(self) -> bool:
        return all(bool((one.view(-1, 4) == self.pattern).all()) for one in (self.before, self.after))


class Guards:
    """Puts tensors of a device between guards.

    Args:
        device: the type of the device; tensors of others stay as they are.
    """

    def __init__(self, device: str) -> None:
        self._device, self._blocks, self._n_placed = device, list[_Block](), 0

    def placed(self, value: Any) -> Any:
        """Return a value whose tensors are copies between guards; those that share memory do so again."""
        if isinstance(value, Tensor):
            return self._placed(value, {})
        if isinstance(value, list | tuple):
            return type(value)(self.placed(one) for one in value)
        return value

    def place_weights(self, model: Any) -> None:
        """Put what a module holds, and the modules in it, between guards: parameters, buffers, and other tensors that are attributes."""
        storages: dict[int, torch.UntypedStorage] = {}
        for one in _held_by(model):
            one.data = self._placed(one.data, storages)

    def check(self) -> None:
        """Compare all guards, and forget those whose tensors are gone.

        Raises:
            BoundsError: one is not what it was.
        """
        n_bad = sum(not block.is_whole() for block in self._blocks)
        if n_bad:
            raise BoundsError(
                f"wrote outside its tensors: beside {n_bad} of the {len(self._blocks)} that it was given or made; "
                "mask what lies behind the end"
            )
        self._blocks = [block for block in self._blocks if not block.storage.expired()]

    def _placed(self, tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """Return a copy of a tensor in a storage between guards, the one that another tensor of its storage was given."""
        if tensor.device.type != self._device or not tensor.untyped_storage().nbytes():
            return tensor
        key = tensor.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = self._copied(tensor)
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return new.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _copied(self, tensor: Tensor) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage between guards.

        It begins where its tensors do, as one of its own: a candidate that asks for an offset gets the one that it had.
        """
        old = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        n_bytes = old.numel()
        guard = min(max(_TIMES * n_bytes, _LEAST), _MOST) // _ALIGNED * _ALIGNED
        whole = torch.empty(2 * guard + n_bytes, dtype=torch.uint8, device=tensor.device)
        before, middle, after = whole.split([guard, n_bytes, guard])
        middle.copy_(old)
        pattern = _pattern(tensor.dtype, self._n_placed).to(tensor.device)
        self._n_placed += 1
        if n_bytes % pattern.element_size():  # the guard behind begins where an element cannot
            pattern = pattern.view(torch.int8)[:4].contiguous()
        before, after = before.view(pattern.dtype), after.view(pattern.dtype)
        for one in (before, after):
            one.view(-1, 4).copy_(pattern)
        storage = from_dlpack(to_dlpack(middle)).untyped_storage()  # keeps the memory of all three
        self._blocks.append(_Block(before, after, pattern, StorageWeakRef(storage)))
        return storage


def _pattern(dtype: torch.dtype, number: int) -> Tensor:
    """Return four elements of a guard, as bits: others for each of some guards in a row, as kernels copy what they read."""
    number %= _N_PATTERNS
    size, dtype = dtype.itemsize, dtype.to_real()
    if dtype in _FLOATS:
        nan, most = _FLOATS[dtype]
        size = dtype.itemsize
        found: Sequence[int] = [
            nan + 1 + number,
            most - number,
            nan + 1 + number,
            (most - number) | 1 << 8 * size - 1,
        ]
    elif dtype.is_floating_point:  # of 8 bits: NaN is 0x7F in all
        found = [0x7F, 0x7E - 4 - number % 4, 0x7F, 0xFE - 4 - number % 4]
    elif dtype is torch.bool:
        found = 4 * [2 + number]  # true, and neither what a kernel stores for true nor for false
    else:
        most = torch.iinfo(_BITS[size]).max
        found = [most - 51 - number, 51 + number - most, most - 51 - number, 51 + number - most]
    bits = _BITS[size]
    half = 1 << 8 * size - 1
    return torch.tensor([(one + half) % (2 * half) - half for one in found], dtype=bits)


def _held_by(model: Any) -> Iterator[Tensor]:
    """Yield each tensor that is an attribute of a module or of one in it, once."""
    seen = set[int]()
    for module in model.modules() if isinstance(model, torch.nn.Module) else (model,):
        for one in tensors_of(list(getattr(module, "__dict__", {}).values())):
            if id(one) not in seen and type(one) in (Tensor, torch.nn.Parameter):
                seen.add(id(one))
                yield one
