"""The dense MLP: a gate, and up and down projections."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.builder import Builder
from slime_torch.layers.part import Routes


class GatedMlp:
    """down(activation(gate(x)) * up(x)), of gate and up apart or, where folders have them so or a kernel takes them so, in one matrix.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.mlp.`.
        activation: of the gate; SiLU when not given, which is done with the product.
    """

    has_one_shape = True

    def __init__(
        self, builder: Builder, prefix: str, *, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._activation = activation
        self._gate_up = self._gate = self._up = None
        self._has_kernel = builder.has_gpu_kernels and activation is None
        if builder.has(f"{prefix}gate_up_proj.weight"):
            self._gate_up = builder.matrix(f"{prefix}gate_up_proj.weight")
        elif self._has_kernel:
            self._gate_up = builder.matrix(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
        else:
            self._gate = builder.matrix(f"{prefix}gate_proj.weight")
            self._up = builder.matrix(f"{prefix}up_proj.weight")
        self._down = builder.matrix(f"{prefix}down_proj.weight")

    def __call__(self, x: Tensor, residual: Tensor | None, routes: Routes | None) -> Tensor:
        """Return the MLP of rows [n, hidden_size], plus `residual`."""
        if self._gate is None or self._up is None:
            assert self._gate_up is not None
            inner = self._gated(self._gate_up.linear(x))
        else:
            gate = self._gate.linear(x, then="swish" if self._activation is None else "none")
            gate = gate if self._activation is None else self._activation(gate)
            inner = self._up.linear(x, then="mul", other=gate)
        return self._down.linear(inner, then="none" if residual is None else "add", other=residual)

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self._has_kernel:
            from slime_models.swiglu import swiglu

            product: Tensor = swiglu(gate_up)
            return product
        gate, up = gate_up.chunk(2, dim=-1)
        gate = F.silu(gate) if self._activation is None else self._activation(gate)
        return gate.mul_(up)
