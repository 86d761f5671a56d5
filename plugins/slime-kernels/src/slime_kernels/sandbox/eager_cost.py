"""`EagerCost`: what PyTorch does for a module, operation by operation, without doing it (on tensors without memory)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from slime_kernels.sandbox.values import tensors_of


class EagerCost(TorchDispatchMode):
    """Counts the bytes and operations of each kernel that PyTorch would launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.operations: list[dict[str, Any]] = []
        self.is_counting = True
        """Operations that are not counted belong to one that is."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it unless it only views."""
        result = func(*args, **(kwargs or {}))
        outputs = tensors_of(result)
        if not outputs or func.is_view or not self.is_counting:
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


class OneAttention(TorchFunctionMode):
    """Counts attention as the one kernel that it is on a GPU: on tensors without memory PyTorch takes it apart.

    Args:
        cost: counts all else.
    """

    def __init__(self, cost: EagerCost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch."""
        given = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **given)
        self._cost.is_counting = False
        try:
            result = func(*args, **given)
        finally:
            self._cost.is_counting = True
        tensors = tensors_of([args, given])
        query, key = (given[name] if name in given else args[at] for at, name in enumerate(("query", "key")))
        flops = 2 * key.shape[-2] * (query.numel() + result.numel())  # of two products
        causal = given.get("is_causal") or (len(args) > 5 and args[5])
        moved = sum(map(_bytes, [*tensors, result]))
        self._cost.operations.append(
            {
                "name": func.__name__,
                "bytes": moved,
                "flops": flops // 2 if causal else flops,
                "products": True,
            }
        )
        return result


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that are read of a tensor: of one that is expanded, those that are there."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()
