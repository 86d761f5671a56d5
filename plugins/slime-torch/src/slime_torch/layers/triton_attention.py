"""`TritonAttention`: what `TorchAttention` does, by kernels of Triton on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_torch.layers.batch import Batch
from slime_torch.layers.torch_attention import HeadsPass, TorchAttention
from slime_torch.storage.cache import KvCache


class TritonAttention:
    """By kernels of Triton; the cache has the model's dtype. Nothing has a shape that depends on how long requests are.

    Args:
        numbers: what has the model's numbers, tables and norms; the tables are contiguous.
    """

    def __init__(self, numbers: TorchAttention) -> None:
        self.numbers, head_dim = numbers, numbers.architecture.head_dim
        self.scale = head_dim**-0.5 if numbers.scale is None else numbers.scale
        device = numbers.tables[0].device
        self.multiprocessors = 1
        if device.type == "cuda" and torch.cuda.is_available():
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def begin(self, batch: Batch, cache: KvCache) -> HeadsPass:
        """Begin a pass. The cache keeps its size until it is over."""
        return _TritonPass(self, batch, cache)


class _TritonPass:
    def __init__(self, owner: TritonAttention, batch: Batch, cache: KvCache) -> None:
        from slime_torch.kernels import triton_operators

        self._operators, self._owner, self._batch, self._cache = triton_operators, owner, batch, cache
        self._numbers = owner.numbers
        self._positions = batch.positions.contiguous()
        self._splits = triton_operators.splits_for(
            len(batch.positions) * owner.numbers.architecture.num_query_groups,
            batch.most_held,
            multiprocessors=owner.multiprocessors,
        )

    def place(self, layer: int, heads: Tensor) -> None:
        norms, batch = self._numbers.norms[layer], self._batch
        query, key = (None, None) if norms is None else (norm.weight for norm in norms)
        self._operators.place_heads(
            heads,
            self._cache.layer(layer),
            *self._numbers.tables,
            query,
            key,
            0.0 if norms is None else norms[0].epsilon,
            self._positions,
            batch.page,
            batch.inside,
        )

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        owner = self._owner
        attended: Tensor = self._operators.attend_pages(
            heads,
            self._cache.layer(layer),
            self._positions,
            self._batch.pages,
            self._numbers.sinks(layer),
            owner.scale,
            self._numbers.window or 0,
            self._splits,
        )
        return attended
