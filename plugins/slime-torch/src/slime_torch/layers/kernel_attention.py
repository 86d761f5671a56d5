"""`KernelAttention`: what `TorchAttention` does, by compiled kernels."""

from __future__ import annotations

import torch
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_torch.kernels.launch import Kernel, compiled
from slime_torch.layers.torch_attention import HeadNorms, HeadsPass
from slime_torch.storage.cache import KvCache


class KernelAttention:
    """By compiled kernels, on a CPU; the cache has the model's dtype.

    Args:
        architecture: the model's numbers; `head_dim` is a multiple of 16.
        tables: cosine and signed sine [positions, head_dim], bfloat16 or float32, contiguous.
        norms: of heads.
        scale: multiplies scores; the root of the inverse of the heads' width when not given.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        tables: tuple[Tensor, Tensor],
        norms: HeadNorms,
        scale: float | None = None,
    ) -> None:
        from slime_torch.kernels.compiled import attend_kernel, place_kernel

        self.architecture, self.tables, self.norms = architecture, tables, norms
        itemsize, dim = tables[0].itemsize, architecture.head_dim
        self.scale = dim**-0.5 if scale is None else scale
        group = architecture.num_attention_heads // architecture.num_query_groups
        self.place = compiled(place_kernel, itemsize)
        self.attend = compiled(attend_kernel, itemsize, dim=dim, group=group)

    def begin(self, positions: Tensor, slots: Tensor, cache: KvCache) -> HeadsPass:
        """Begin a pass. The cache keeps its size until it is over."""
        return _KernelPass(self, positions.contiguous(), slots.contiguous(), cache)


class _KernelPass:
    def __init__(self, owner: KernelAttention, positions: Tensor, slots: Tensor, cache: KvCache) -> None:
        self._kept = positions, slots, owner  # whose memory the blocks name
        self._addresses, self._query_size = cache.addresses, owner.architecture.query_size
        self._norms = [
            (0, 0) if pair is None else (pair[0].weight_address, pair[1].weight_address)
            for pair in owner.norms
        ]
        a, n = owner.architecture, len(positions)
        cosine, sine = owner.tables
        self._place = Kernel(owner.place, words=17)
        self._place.set(1, n, a.num_attention_heads, a.num_query_groups, a.head_dim)
        self._place.set(6, cosine.data_ptr(), sine.data_ptr(), positions.data_ptr(), slots.data_ptr())
        self._place.set(12, cache.slots, cache.capacity)
        self._place.set_float(16, a.norm_epsilon)
        self._attend = Kernel(owner.attend, words=10)
        self._attend.set(1, n, a.num_query_groups, cache.capacity)
        self._attend.set(7, positions.data_ptr())
        self._attend.set_float(9, owner.scale)

    def place(self, layer: int, heads: Tensor) -> None:
        self._place.set(5, heads.data_ptr())
        self._place.set(10, *self._addresses[layer])
        self._place.set(14, *self._norms[layer])
        self._place.run()

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        out = torch.empty(len(heads), self._query_size, dtype=heads.dtype)
        self._attend.set(4, heads.data_ptr(), *self._addresses[layer])
        self._attend.set(8, out.data_ptr())
        self._attend.run()
        return out
