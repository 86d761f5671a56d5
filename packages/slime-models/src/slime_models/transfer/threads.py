"""`on_threads`: work over the bytes of many tensors in host memory, in parts of equal size, on threads that compute alone."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any

import torch
from slime_core.runtime.openmp import compute_alone
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slime_models.jit import compiled, has_numba

#: Bytes that a thread gets at once.
_PART_BYTES = 1 << 24
#: So many bytes have no place in caches, and are worth loading numba for.
_MANY_BYTES = 1 << 25
#: Bytes of copies that are put off at most.
_BATCH_BYTES = 1 << 26
_FIELDS = ("data", "device", "dtype", "is_meta", "ndim", "nbytes", "requires_grad", "shape")
#: What writes numbers that are not read from a tensor.
_CONSTANTS: frozenset[Any] = frozenset({Tensor.fill_, Tensor.zero_})
#: What looks at a tensor, or takes a view of it.
_LOOKS: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _FIELDS),
        Tensor.__len__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_contiguous,
        Tensor.narrow,
        Tensor.numel,
        Tensor.size,
        Tensor.stride,
        Tensor.view,
    }
)


@dataclass(frozen=True)
class Piece:
    """Some bytes of one of several tensors."""

    owner: int
    """Which tensor."""
    start: int
    """Byte at which it begins."""
    end: int
    """Byte at which it ends."""


def parts_of(sizes: Sequence[int], *, unit: int = 1) -> list[list[Piece]]:
    """Cut tensors of so many bytes into parts of `_PART_BYTES`, at multiples of `unit` bytes; each byte is in one of them.

    Neighbours share a part, and an empty tensor has an empty piece.
    """
    most = max(1, _PART_BYTES // unit) * unit
    parts: list[list[Piece]] = []
    room = 0
    for owner, size in enumerate(sizes):
        start = 0
        while True:
            if room < unit:
                parts.append([])
                room = most
            end = min(size, start + room // unit * unit)
            parts[-1].append(Piece(owner, start, end))
            room -= end - start
            if end == size:
                break
            start = end
    return parts


def on_threads[W, R](function: Callable[[W], R], work: Sequence[W]) -> list[R]:
    """Return what a function returns for each piece of work, on as many threads as torch has for one computation here.

    What such a thread computes it computes without workers of its own. It is not in the caller's `torch.no_grad`, and its own
    work must not call this. Callers at one time share the threads.
    """
    n_threads = min(torch.get_num_threads(), len(work))
    if n_threads < 2:
        return [function(each) for each in work]
    return list(_threads(os.getpid(), n_threads).map(function, work))


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors: each of a list of (target, source) has one shape.

    Where both lie contiguous in host memory, bytes are copied as such, without torch's workers; where numba is installed, many of them
    past the caches.
    """
    plain = [pair for pair in pairs if is_plain(*pair)]
    for target, source in pairs:
        if not is_plain(target, source):
            target.copy_(source.detach())
    sizes = [source.nbytes for _, source in plain]
    copy = _copy_compiled() if sum(sizes) >= _MANY_BYTES and has_numba() else ctypes.memmove
    places = [(target.data_ptr(), source.data_ptr()) for target, source in plain]

    def copy_part(part: Sequence[Piece]) -> None:
        for piece in part:
            target, source = places[piece.owner]
            copy(target + piece.start, source + piece.start, piece.end - piece.start)

    on_threads(copy_part, parts_of(sizes))


def is_compiled_for(n_bytes: int) -> bool:
    """Return whether work on so many bytes is done by what numba compiles: where it is installed, and loaded or worth loading."""
    return (n_bytes >= _MANY_BYTES or "numba" in sys.modules) and has_numba()


@functools.cache
def _copy_compiled() -> Callable[[int, int, int], Any]:
    """Return `ctypes.memmove` past the caches."""
    from slime_models.transfer.kernels.numba_kernels import make_copy

    found: Callable[[int, int, int], Any] = compiled(make_copy)
    return found


class PlainCopies(TorchFunctionMode):
    """Within it `Tensor.copy_` copies bytes as `copy_all` does, many tensors at once, where that comes to the same.

    Torch's own copy of 1 MiB goes to workers, which costs several times as much where other processes want the cores, too. A copy
    is put off until something else is done with any tensor than to look at its shape or to take a view of it, until it would
    overlap another, until `_BATCH_BYTES` wait, or to the end; what is copied must not be changed meanwhile but through torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_copied = 0
        """Elements that `Tensor.copy_` copied, at once or put off."""
        self.only_copied = True
        """Whether nothing else was done with any tensor than to copy it, to look at it, to write constants, and to list whole numbers
        (SGLang's map of experts)."""
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._n_bytes = 0
        self._written: dict[int, list[tuple[int, int]]] = {}
        self._read: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Put a copy off, or call what was called."""
        if func is Tensor.copy_ and len(args) == 2 and not kwargs and args[0].shape == args[1].shape:
            target, source = args
            self.n_copied += target.numel()
            if is_plain(target, source) and not torch.is_grad_enabled():
                self._put_off(target, source)
                return target
            self._copy()
        elif not _only_looks(func, args):
            self.only_copied &= _makes_no_weight(func, args)
            self._copy()
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        """Copy what waits."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own
        self._copy()

    def _put_off(self, target: Tensor, source: Tensor) -> None:
        memory, begin = target.untyped_storage().data_ptr(), target.data_ptr()
        end, reads = begin + target.nbytes, source.untyped_storage().data_ptr()
        meets = any(begin < other_end and other < end for other, other_end in self._written.get(memory, ()))
        if meets or memory in self._read or reads in self._written or memory == reads:
            self._copy()
        self._waiting.append((target, source))
        self._written.setdefault(memory, []).append((begin, end))
        self._read.add(reads)
        self._n_bytes += target.nbytes
        if self._n_bytes >= _BATCH_BYTES or memory == reads:
            self._copy()

    def _copy(self) -> None:
        waiting, self._waiting, self._n_bytes = self._waiting, [], 0
        self._written.clear()
        self._read.clear()
        if waiting:
            copy_all(waiting)


def _only_looks(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function of torch reads and writes no element of a tensor."""
    if func is Tensor.__getitem__:  # by numbers and slices it is a view
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(isinstance(each, int | slice | NoneType | EllipsisType) for each in index)
    return func in _LOOKS


def _makes_no_weight(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function of torch writes constants, or lists whole numbers."""
    if func is Tensor.tolist:
        return not args[0].is_floating_point()
    return func in _CONSTANTS and not any(isinstance(each, Tensor) for each in args[1:])


def is_plain(target: Tensor, source: Tensor) -> bool:
    """Whether a source lies contiguous in host memory, as does the target, and both have one dtype."""
    on_host = source.device.type == target.device.type == "cpu"
    return on_host and source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Return a process's threads; new ones for each call would touch new memory, which takes a fifth of a fingerprint's time."""
    return ThreadPoolExecutor(count, thread_name_prefix="weights", initializer=_alone)


def _alone() -> None:
    torch.get_num_threads()  # sets this thread's number, once
    compute_alone()
