"""`KernelAttention`: what `TorchAttention` does, by compiled kernels."""

from __future__ import annotations

import torch
from slime_models.family.architecture import Architecture
from slime_models.jit import compiled
from torch import Tensor

from slime_torch.kernels.launch import Kernel
from slime_torch.layers.batch import Batch
from slime_torch.layers.torch_attention import HeadNorms, HeadsPass
from slime_torch.storage.cache import PAGE_LEN, KvCache


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

        self.architecture, self.norms = architecture, norms
        self.angles = torch.stack(tables)
        itemsize, dim = tables[0].itemsize, architecture.head_dim
        self.scale = dim**-0.5 if scale is None else scale
        group = architecture.num_attention_heads // architecture.num_query_groups
        self.place = compiled(place_kernel, itemsize, page_len=PAGE_LEN)
        self.attend = compiled(attend_kernel, itemsize, dim=dim, group=group, page_len=PAGE_LEN)

    def begin(self, batch: Batch, cache: KvCache) -> HeadsPass:
        """Begin a pass. The cache keeps its size until it is over."""
        return _KernelPass(self, batch, cache)


class _KernelPass:
    def __init__(self, owner: KernelAttention, batch: Batch, cache: KvCache) -> None:
        positions, pages = batch.positions.contiguous(), batch.pages.contiguous()
        where = torch.stack((positions, batch.page, batch.inside))
        self._kept = positions, pages, where, owner  # whose memory the blocks name
        self._addresses, self._query_size = cache.addresses, owner.architecture.query_size
        self._norms = [
            (0, 0, 0.0) if pair is None else (pair[0].weight_address, pair[1].weight_address, pair[0].epsilon)
            for pair in owner.norms
        ]
        a, n = owner.architecture, len(positions)
        self._place = Kernel(owner.place, words=14)
        self._place.set(1, n, a.num_attention_heads, a.num_query_groups, a.head_dim)
        self._place.set(5, owner.angles.size(1), cache.n_pages)
        self._place.set(8, owner.angles.data_ptr(), where.data_ptr())
        self._attend = Kernel(owner.attend, words=11)
        self._attend.set(1, n, a.num_query_groups, pages.size(1))
        self._attend.set(7, positions.data_ptr(), pages.data_ptr())
        self._attend.set_float(10, owner.scale)

    def place(self, layer: int, heads: Tensor) -> None:
        self._place.set(7, heads.data_ptr())
        self._place.set(10, self._addresses[layer][0])
        query, key, epsilon = self._norms[layer]
        self._place.set(11, query, key)
        self._place.set_float(13, epsilon)
        self._place.run()

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        out = torch.empty(len(heads), self._query_size, dtype=heads.dtype)
        self._attend.set(4, heads.data_ptr(), *self._addresses[layer])
        self._attend.set(9, out.data_ptr())
        self._attend.run()
        return out
