"""The dense MLP: a gate, and up and down projections."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.builder import Builder
from slime_torch.layers.part import Routes


class GatedMlp:
    """down(activation(gate(x)) * up(x)), of gate and up apart or, where folders have them so, in one matrix.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.mlp.`.
        activation: of the gate; SiLU when not given, which is done with the product.
    """

    def __init__(
        self, builder: Builder, prefix: str, *, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._activation = activation
        self._gate_up = self._gate = self._up = None
        if builder.has(f"{prefix}gate_up_proj.weight"):
            self._gate_up = builder.matrix(f"{prefix}gate_up_proj.weight")
        else:
            self._gate = builder.matrix(f"{prefix}gate_proj.weight")
            self._up = builder.matrix(f"{prefix}up_proj.weight")
        self._down = builder.matrix(f"{prefix}down_proj.weight")

    def __call__(self, x: Tensor, residual: Tensor | None, routes: Routes | None) -> Tensor:
        """Return the MLP of rows [n, hidden_size], plus `residual`."""
        if self._gate is None or self._up is None:
            assert self._gate_up is not None
            gate, up = self._gate_up.linear(x).chunk(2, dim=-1)
            gate = F.silu(gate) if self._activation is None else self._activation(gate)
            inner = gate.mul_(up)
        else:
            gate = self._gate.linear(x, then="swish" if self._activation is None else "none")
            gate = gate if self._activation is None else self._activation(gate)
            inner = self._up.linear(x, then="mul", other=gate)
        return self._down.linear(inner, then="none" if residual is None else "add", other=residual)
