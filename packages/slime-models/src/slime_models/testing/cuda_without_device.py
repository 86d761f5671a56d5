"""Tensors of the device cuda that have no data, for tests on a machine without a GPU: nothing is computed.

Within `cuda_without_device` an operation on tensors of different devices is an error, as on CUDA, and the operations that would be
launched are counted, and those for which the host would wait. Numbers that the host asks for are made up, so that code goes on.
torch's autograd wants a real device: no backward pass can be run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from slime_models import triton_launch

CUDA = torch.device("cuda")

#: Operations that only look at a tensor in another way, or take memory: nothing is launched.
_NO_KERNEL = frozenset(
    ("view", "as_strided", "slice", "select", "split", "split_with_sizes", "transpose", "unsqueeze", "squeeze", "expand", "t",
     "detach", "alias", "unbind", "permute", "empty", "_unsafe_view", "reshape", "_reshape_alias", "lift_fresh", "unfold",
     "resolve_conj", "resolve_neg", "new_empty", "empty_like", "empty_strided", "view_as"),
)  # fmt: skip


class Counted:
    """What was done within `cuda_without_device`, in order."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        """Operations on the device that launch a kernel or a copy."""
        self.waits: list[str] = []
        """Those for which the host waits: numbers that it asks for, sizes that depend on numbers, copies that block."""
        self.attention: list[frozenset[str]] = []
        """Kernels among which each call of `scaled_dot_product_attention` may choose: flash, efficient, plain, cudnn."""


@contextlib.contextmanager
def cuda_without_device() -> Iterator[Counted]:
    """Let tensors of the device cuda be made and computed with, and count what would be done."""
    counted = Counted()

    def tolist(self: Tensor) -> Any:
        if self.is_cuda:
            counted.waits.append("tolist")
        return _zeros(self).tolist()

    # What torch has in the place of `tolist` asks for one number after another.
    with (
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch.object(triton_launch, "_is_complete", lambda: True),  # nothing is compiled
        FakeTensorMode(),
        _Calls(counted),
        _Operations(counted),
    ):
        yield counted


def on_cuda[T](value: T) -> T:
    """Return a tensor, or a dataclass with its tensors, of the device cuda and without data; other values as they are."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=CUDA)  # type: ignore[return-value]  # `T` is Tensor
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: on_cuda(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


class _Calls(TorchFunctionMode):
    """Takes down the kernels that attention may have, and answers `numpy` with zeros."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self._counted.attention.append(_attention_kernels())
        if func is Tensor.numpy and not args[0].is_cuda:
            if isinstance(args[0], FakeTensor):
                return _zeros(args[0])
            with no_dispatch():  # it has its numbers
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _zeros(like: Tensor) -> NDArray[Any]:
    """Return zeros of a tensor's shape; numpy has no bfloat16, and its numbers are those of float32."""
    dtype = torch.float32 if like.dtype is torch.bfloat16 else like.dtype
    return np.zeros(tuple(like.shape), dtype=str(dtype).removeprefix("torch."))


def _attention_kernels() -> frozenset[str]:
    cuda = torch.backends.cuda
    allowed = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "plain": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return frozenset(name for name, is_allowed in allowed.items() if is_allowed)


class _Operations(TorchDispatchMode):
    """Counts operations, and gives numbers to a host that asks for them."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, _without_data, (args, kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if torch.is_inference_mode_enabled() and not name.startswith("prim::"):
            with self:  # elsewhere torch takes operations that consist of others apart
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if name == "_local_scalar_dense" and args[0].is_cuda:
            self._counted.waits.append(name)
            return _zeros(args[0]).item()
        if name == "nonzero" and args[0].is_cuda:  # as if all were true
            self._counted.operations.append(name)
            self._counted.waits.append(name)
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=CUDA)
        result = func(*args, **kwargs)
        if _on_device(args) or _on_device(kwargs) or _on_device(result):
            if name not in _NO_KERNEL and not name.startswith("prim::"):
                self._counted.operations.append(name)
            if (wait := _waits(name, args, kwargs, result)) is not None:
                self._counted.waits.append(wait)
        return result


def _without_data(tensor: Tensor) -> Tensor:
    """Return a tensor without data in the place of one of the host that has some, such as an array's."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _on_device(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cuda"
    if isinstance(value, dict):
        value = value.values()
    return isinstance(value, (list, tuple, type({}.values()))) and any(_on_device(each) for each in value)


def _waits(name: str, args: Any, kwargs: dict[str, Any], result: Any) -> str | None:
    """Return the name of an operation for which the host waits although its shapes are known; None if it does not."""
    if name == "_to_copy":
        return _copy(args[0], result, waits=not kwargs.get("non_blocking", False))
    if name == "copy_":
        return _copy(args[1], args[0], waits=not (args[2:] or [kwargs.get("non_blocking", False)])[0])
    if name in ("index", "index_put", "index_put_"):
        given = [index for index in args[1] if index is not None]
        if any(index.device.type == "cpu" and index.dim() for index in given):
            return f"{name} by an index of the host"
        is_filled = (
            name != "index" and args[2].numel() == 1 and len(given) == 1
        )  # torch fills by the mask itself
        if any(index.dtype is torch.bool for index in given) and not is_filled:
            return f"{name} by a mask"
    return None


def _copy(source: Tensor, target: Tensor, *, waits: bool) -> str | None:
    if source.device.type == target.device.type or not waits or (source.dim() == 0 and not source.is_cuda):
        return None
    return f"copy to {target.device.type}"
