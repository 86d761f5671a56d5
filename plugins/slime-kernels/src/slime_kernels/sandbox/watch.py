"""`Watch`: what a candidate has PyTorch do while it is called, and which of its answers kernels wrote."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_kernels.sandbox.guards import Guards
from slime_kernels.sandbox.values import tensors_of

#: Operations that make tensors out of nothing.
_FACTORIES = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
        "arange",
        "scalar_tensor",
        "zero_",
        "fill_",
        "lift_fresh",
        "lift_fresh_copy",
    ]
)
#: Operations that move numbers and change none, other than views.
_MOVES = frozenset(["clone", "_to_copy", "copy_", "contiguous", "cat", "stack", "constant_pad_nd", "repeat"])
#: Operations that answer with what is no tensor.
_QUESTIONS = frozenset(["_local_scalar_dense", "is_same_size", "item", "equal"])
#: Numbers that may be read out of tensors in a call.
_MOST_READ = 16
_POISONED = frozenset(name for name in _FACTORIES if "empty" in name)


class WatchedWork(Protocol):
    """What launches kernels while a candidate is watched."""

    samples: int | None
    """Of each launch, how many programs are run, for their cost alone; all where None."""
    inside: bool
    """A launch is running: what torch does now is its own."""
    written: dict[int, NDArray[np.bool_]]
    """Storage's address -> for each byte, whether an element that begins there was stored by a kernel."""
    sees_stores: bool
    """`written` has what kernels store."""

    def recording(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """Take down the launches of the block."""


class Watch(TorchDispatchMode):
    """Sees each operation of PyTorch in a block, fills new memory with nonsense, and follows what kernels wrote.

    Args:
        work: knows what kernels write; its own operations are not looked at.
        guards: between which new memory lies.
    """

    def __init__(self, work: WatchedWork, guards: Guards | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._work, self._guards = work, guards
        self._alive: list[Tensor] = []
        self._n_read = 0
        self.delegated: list[str] = []
        """Names of the operations that computed something."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and take down what it is."""
        result = func(*args, **(kwargs or {}))
        if self._work.inside:
            return result
        name = func.overloadpacket.__name__
        if self._guards is not None and name in _FACTORIES | _MOVES and _makes(func):
            result = self._guards.placed(result)
        made = tensors_of(result)
        self._alive += made  # so that no later tensor gets the memory of an earlier one
        if self._work.samples or func.is_view:
            if self._work.samples and not self._is_known(func, name):
                self.delegated.append(name)
            return result
        given = tensors_of([args, kwargs or {}])
        self._n_read += name == "_local_scalar_dense"
        if self._n_read > _MOST_READ:
            self.delegated.append("reading numbers one by one")
        elif name in _FACTORIES:
            for one in made:
                self._forget(one)
                if name in _POISONED:
                    poison(one)
        elif name in _MOVES or all(one.numel() <= 1 for one in (*given, *made)):
            self._carry(given, made)
        elif name not in _QUESTIONS:
            self.delegated.append(name)
        return result

    def outputs(self, result: Any) -> list[dict[str, Any]]:
        """Return of each tensor of an answer: whether it is a plain one, and how much of it no kernel wrote, if that is seen."""
        return [
            {
                "plain": is_plain(one),
                "unwritten": one.numel() - int(self._marks(one).sum()) if self._work.sees_stores else 0,
            }
            for one in tensors_of(result)
        ]

    def _is_known(self, func: Any, name: str) -> bool:
        return bool(func.is_view) or name in _FACTORIES | _MOVES | _QUESTIONS

    def _marks(self, tensor: Tensor) -> NDArray[np.bool_]:
        """Return, for each element, whether a kernel wrote it."""
        found = self._work.written.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return np.zeros(tensor.numel(), dtype=bool)
        return found[_offsets(tensor)]

    def _forget(self, tensor: Tensor) -> None:
        self._work.written.pop(tensor.untyped_storage().data_ptr(), None)

    def _carry(self, given: list[Tensor], made: list[Tensor]) -> None:
        """Count what was moved as written by a kernel, if all of it was."""
        if not self._work.sees_stores:
            return
        sources = [one for one in given if not any(one is other for other in made)]
        whole = bool(sources) and all(bool(self._marks(one).all()) for one in sources if one.numel())
        for one in made:
            storage = one.untyped_storage()
            marks = self._work.written.setdefault(storage.data_ptr(), np.zeros(storage.nbytes(), dtype=bool))
            marks[_offsets(one)] = whole


def _makes(func: Any) -> bool:
    """Return whether what an operation answers with is new memory, and none of its arguments."""
    return all(one.alias_info is None for one in func._schema.returns)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one, and no object that only answers like one."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _offsets(tensor: Tensor) -> NDArray[np.int64]:
    """Return where in its storage each element begins, in bytes."""
    offsets = np.array([tensor.storage_offset()], dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return offsets * tensor.element_size()


def poison(tensor: Tensor) -> None:
    """Fill new memory with what no answer is: NaN, or a large number."""
    if tensor.dtype is torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max - 51)
