"""`TritonAttention`: what `TorchAttention` does, by kernels of Triton on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_torch.layers.batch import Batch
from slime_torch.layers.torch_attention import HeadNorms, HeadsPass
from slime_torch.storage.cache import KvCache
from slime_torch.storage.weights import Fused


class TritonAttention:
    """By kernels of Triton; the cache has the model's dtype. Nothing has a shape that depends on how long requests are.

    Args:
        architecture: the model's numbers.
        tables: cosine and signed sine [positions, head_dim], contiguous.
        norms: of heads.
        scale: multiplies scores; the root of the inverse of the heads' width when not given.
        window: tokens that each one sees, itself among them; all earlier ones when not given.
        sinks: of each layer, the sinks of its heads [heads], if it has any.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        tables: tuple[Tensor, Tensor],
        norms: HeadNorms,
        scale: float | None = None,
        window: int | None = None,
        sinks: Sequence[Fused] | None = None,
    ) -> None:
        self.architecture, self.tables, self.norms, self.sinks = architecture, tables, norms, sinks
        self.scale = architecture.head_dim**-0.5 if scale is None else scale
        self.window = window or 0
        device = tables[0].device
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
        self._positions = batch.positions.contiguous()
        self._splits = triton_operators.splits_for(
            len(batch.positions) * owner.architecture.num_query_groups,
            batch.most_held,
            multiprocessors=owner.multiprocessors,
        )

    def place(self, layer: int, heads: Tensor) -> None:
        norms, batch = self._owner.norms[layer], self._batch
        query, key = (None, None) if norms is None else (norm.weight for norm in norms)
        self._operators.place_heads(
            heads,
            self._cache.layer(layer),
            *self._owner.tables,
            query,
            key,
            self._owner.architecture.norm_epsilon,
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
            None if owner.sinks is None else owner.sinks[layer].tensor,
            owner.scale,
            owner.window,
            self._splits,
        )
        return attended
