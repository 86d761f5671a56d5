"""`Builder`: makes the weights of a decoder's parts, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from slime_core.errors import EngineError
from slime_models.cpu import attends_in_bfloat16
from slime_models.family.architecture import Architecture
from slime_models.triton_launch import can_launch

from slime_torch.kernels.launch import can_compile
from slime_torch.layers.norm import Norm
from slime_torch.storage.weights import Fused, Shape, can_pack


class Builder:
    """Every tensor of the model is asked for once, and is loaded, updated and fingerprinted from then on.

    What a part derives from weights it derives in a subclass of `Fused`, whenever its `write` is called, as `Norm` does.

    Args:
        architecture: the model's numbers.
        shapes: Hugging Face name -> shape of every tensor of the model.
        float32: names of those that are float32 whatever the model's dtype.
        prefix: of the names of the decoder's tensors.
        max_length: most positions.
        dtype: storage and compute dtype.
        device: where the weights live.
        with_kernels: compute what lies between products by compiled kernels, where they can be compiled and run: on a CPU by numba,
            on a GPU by Triton.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        shapes: Mapping[str, Shape],
        float32: frozenset[str] = frozenset(),
        prefix: str = "model.",
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        with_kernels: bool = True,
    ) -> None:
        self.architecture, self.max_length, self.dtype, self.device = architecture, max_length, dtype, device
        self.has_kernels = (
            with_kernels and device.type == "cpu" and architecture.head_dim % 16 == 0 and can_compile()
        )
        self.has_gpu_kernels = with_kernels and can_launch(device)
        self.attention_dtype = attention_dtype(dtype, device)
        self.packs = can_pack(dtype, device)
        self.made: list[Fused] = []
        """All weights, in the order in which they were asked for."""
        self.matrices: list[Fused] = []
        """Those that every token is multiplied by."""
        self._shapes, self._float32, self._prefix = shapes, float32, prefix

    def layer_prefix(self, number: int) -> str:
        """Return what the names of a layer's tensors begin with."""
        return f"{self._prefix}layers.{number}."

    def has(self, name: str) -> bool:
        """Return whether the model has a tensor."""
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor.

        Raises:
            EngineError: the model has no such tensor.
        """
        if name not in self._shapes:
            raise EngineError(
                f"{self.architecture.model_type}: the model has no {name}, which the torch engine's layers are made of: "
                "choose another --rollout-engine, or name a decoder in the model family"
            )
        return self._shapes[name]

    def matrix(self, *names: str, orders: Mapping[str, Sequence[int]] | None = None) -> Fused:
        """Return matrices that tokens are multiplied by, one above the other: in the layout that is fastest for that alone.

        Args:
            names: of tensors [rows, columns].
            orders: of those whose rows are stored in another order: name -> for each place, the row that is there.
        """
        fused = self._fuse(names, orders, packed=self.packs)
        self.matrices.append(fused)
        return fused

    def tensor(self, *names: str, orders: Mapping[str, Sequence[int]] | None = None) -> Fused:
        """Return tensors in row-major layout, one above the other: a bias, a convolution, matrices that are looked into."""
        return self._fuse(names, orders, packed=False)

    def norm(
        self,
        name: str,
        order: Sequence[int] | None = None,
        *,
        offset: float = 0.0,
        epsilon: float | None = None,
    ) -> Norm:
        """Return the RMS norm whose weight is `name`.

        Args:
            name: of the tensor.
            order: for each place, the number of the weight that is stored there; None for the folder's.
            offset: added to the weight.
            epsilon: added to the mean square; the architecture's when not given.
        """
        norm = Norm(
            name,
            self.shape(name),
            epsilon=self.architecture.norm_epsilon if epsilon is None else epsilon,
            dtype=self.dtype,
            device=self.device,
            compile_kernel=self.has_kernels,
            order=order,
            offset=offset,
        )
        self.made.append(norm)
        return norm

    def _fuse(
        self, names: Sequence[str], orders: Mapping[str, Sequence[int]] | None, *, packed: bool
    ) -> Fused:
        parts = {name: self.shape(name) for name in names}
        kept = self._float32.intersection(names)
        assert len(kept) in (0, len(parts)), f"{names}: some are float32 and some are not"
        dtype = torch.float32 if kept else self.dtype
        fused = Fused(parts, dtype=dtype, device=self.device, packed=packed and not kept, orders=orders)
        self.made.append(fused)
        return fused


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that PyTorch's attention has beside weights of `dtype`: float32 where that is faster."""
    return dtype if device.type == "cuda" or attends_in_bfloat16() else torch.float32
