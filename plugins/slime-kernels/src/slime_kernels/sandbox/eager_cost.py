"""`EagerCost`: what PyTorch does for a module, operation by operation, without doing it (on tensors without memory)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from slime_kernels.sandbox.values import tensors_of


class EagerCost(TorchDispatchMode):
    """Counts the bytes and operations of each kernel that PyTorch would launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.operations: list[dict[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it unless it only views."""
        result = func(*args, **(kwargs or {}))
        outputs = tensors_of(result)
        if not outputs or func.is_view:
            return result
        inputs = tensors_of([args, kwargs or {}])
        moved = sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
        packet = func.overloadpacket
        products = packet in flop_registry
        if products:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        else:
            flops = max((one.numel() for one in (*inputs, *outputs)), default=0)
        name = packet.__name__
        self.operations.append({"name": name, "bytes": moved, "flops": int(flops), "products": products})
        return result


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that are read of a tensor: of one that is expanded, those that are there."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()
