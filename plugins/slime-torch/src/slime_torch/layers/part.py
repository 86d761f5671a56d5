"""`Layer`, and what its parts promise: attention of some kind, and an MLP of some kind.

What a layer keeps of requests, and what a forward pass computes once for many layers (rows of rotary tables, masks, where the cache
is written), belongs to a `Kind`, which several layers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slime_torch.layers.batch import Batch
from slime_torch.layers.norm import Norm
from slime_torch.storage.cache import Store

#: Of each layer with experts, in order: the experts of each token, int64 [tokens, top_k].
Routes = list[Tensor]


class Kind(Protocol):
    """What attention layers of one kind share.

    A kind may have an attribute `has_one_shape`: whether a decoding step of its layers has shapes that no length changes,
    and keeps all in pages, so that it can be recorded (`RecordedSteps`).
    """

    def create_store(self, *, page_len: int, dtype: torch.dtype | None = None) -> Store:
        """Return an empty store for its layers.

        Args:
            page_len: tokens of a page.
            dtype: of keys and values; the kind's own choice when not given. State that needs another has that.
        """

    def begin(self, batch: Batch, store: Any) -> Any:
        """Begin a forward pass over the tokens of `batch`; returns what its layers are given. The store keeps its size meanwhile.

        Nothing here or in the layers may ask the device for numbers: the host would wait.
        """


class Attention(Protocol):
    """What mixes the tokens of each sequence: attention, or a recurrence."""

    @property
    def kind(self) -> Kind:
        """The kind that it shares with other layers."""

    def mix(self, x: Tensor, now: Any) -> Tensor:
        """Return [tokens, width] of normed tokens [tokens, hidden_size], and keep in the store what later tokens need.

        `now` is what `kind.begin` returned for this pass.
        """

    def project(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Return the product [rows, hidden_size] of some rows of what `mix` gave, plus `residual` if it is given."""


class Mlp(Protocol):
    """What is computed of each token alone.

    It may have an attribute `has_one_shape`: whether its operations on CUDA have shapes that no values change, and ask the device for no
    numbers, so that a step can be recorded (`RecordedSteps`).
    """

    def __call__(self, x: Tensor, residual: Tensor | None, routes: Routes | None) -> Tensor:
        """Return [rows, hidden_size] of normed rows, plus `residual` if it is given; a layer with experts appends to `routes`."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer: both parts add to the residual stream what they make of its norm."""

    input_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    post_attention_norm: Norm | None = None
    """Of what attention gives, before it is added."""
    post_mlp_norm: Norm | None = None
    """Of what the MLP gives, before it is added."""

    def mix(self, residual: Tensor, now: Any) -> Tensor:
        """Return what attention makes of the residual stream [n, hidden_size], before its last product."""
        return self.attention.mix(self.input_norm(residual), now)

    def finish(self, mixed: Tensor, residual: Tensor, routes: Routes | None) -> Tensor:
        """Return the residual stream [n, hidden_size] after the layer, of what `mix` gave and what it was before."""
        if self.post_attention_norm is None:
            residual = self.attention.project(mixed, residual)
        else:
            residual = self.post_attention_norm(self.attention.project(mixed, None)).add_(residual)
        normed = self.mlp_norm(residual)
        if self.post_mlp_norm is None:
            return self.mlp(normed, residual, routes)
        return self.post_mlp_norm(self.mlp(normed, None, routes)).add_(residual)
