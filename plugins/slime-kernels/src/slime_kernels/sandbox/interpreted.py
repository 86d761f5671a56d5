"""`Interpreted`: Triton's interpreter, which here checks every address, looks for races, and counts what a GPU would do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from triton import language
from triton.runtime import interpreter

from slime_kernels.sandbox.launch_memory import LaunchMemory, RaceError
from slime_kernels.sandbox.values import tensors_of

#: Operations of the interpreter whose result's size is the number of operations.
_COUNTED = ("binary_op", "unary_op", "ternary_op", "create_fma", "create_erf", "create_rsqrt", "cast_impl")


class Interpreted:
    """Takes the place of the interpreter's launches in this process.

    Args:
        sampled_programs: of each launch, how many are run, for their cost; all where None, with a search for races.
        counts: whether a launch is the candidate's own, and to be taken down.
    """

    def __init__(
        self, sampled_programs: int | None = None, *, counts: Callable[[], bool] = lambda: True
    ) -> None:
        self.samples, self._counts, self.sees_stores = sampled_programs, counts, True
        self.inside = False
        """A launch is running: what torch does now is the interpreter's."""
        self.written: dict[int, NDArray[np.bool_]] = {}
        """Storage's address -> for each byte, whether an element that begins there was stored by a kernel."""
        self._memory: LaunchMemory | None = None
        self._launches: list[dict[str, Any]] = []
        self._flops = self._products = 0

    def install(self) -> None:
        """Put this in the interpreter's place, for good."""
        self._wrap(interpreter.interpreter_builder)
        interpreter.GridExecutor.__call__ = lambda executor, *args, **kwargs: self._launch(
            executor, args, kwargs
        )

    @contextmanager
    def recording(self) -> Iterator[list[dict[str, Any]]]:
        """Take down the launches of the block."""
        self._launches, self.written = [], {}
        yield self._launches

    def _launch(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a launch, as `GridExecutor.__call__` does, on tensors that are where they are."""
        self.inside = True
        try:
            names = inspect.getfullargspec(executor.fn).args
            given = {name: value for name, value in kwargs.items() if name in names}
            for hook in executor.pre_run_hooks:
                hook(*args, **given)
            bound = inspect.getcallargs(executor.fn, *args, **given)
            tensors = [one for value in bound.values() for one in _tensors(value)]
            self._memory = LaunchMemory(tensors, self.written, seeks_races=self.samples is None)
            self._flops = self._products = 0
            scope = interpreter._patch_lang(executor.fn)
            try:
                converted = {
                    name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
                    for name, value in bound.items()
                }
                self._programs(executor, converted)
            finally:
                scope.restore()
        finally:
            self.inside, self._memory = False, None

    def _programs(self, executor: Any, bound: dict[str, Any]) -> None:
        grid = executor.grid(bound) if callable(executor.grid) else executor.grid
        grid = tuple(int(size) for size in (grid if isinstance(grid, tuple | list) else (grid,)))
        sizes = grid + (1,) * (3 - len(grid))
        if len(sizes) != 3 or min(sizes) < 1:
            raise ValueError(f"a grid of {grid}; wanted one to three sizes above 0")
        n_programs, memory = sizes[0] * sizes[1] * sizes[2], self._memory
        assert memory is not None
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*sizes)
        chosen = _chosen(n_programs, self.samples)
        for number in chosen:
            x, rest = divmod(number, sizes[1] * sizes[2])
            builder.set_grid_idx(x, *divmod(rest, sizes[2]))
            memory.program = number + 1
            executor.fn(**bound)
        if memory.race and not memory.atomics:
            raise RaceError(f"{executor.fn.__name__}: {memory.race}")
        if not self._counts():
            return
        self._launches.append(
            {
                "name": executor.fn.__name__,
                "programs": n_programs,
                "run": len(chosen),
                "flops": self._flops,
                "products": self._products,
                "stores": memory.n_stored,
                **memory.traffic(),
            }
        )

    def _wrap(self, builder: Any) -> None:
        """Put checks and counters around the builder's operations."""
        load, store = builder.create_masked_load, builder.create_masked_store
        rmw, cas, dot = builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_dot

        def masked_load(ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self._memory.load(ptrs.data, mask.data, _size(ptrs))  # type: ignore[union-attr]  # within a launch
            return load(ptrs, mask, *rest, **named)

        def masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._memory.store(ptrs.data, mask.data, _size(ptrs), value.data)  # type: ignore[union-attr]  # within a launch
            return store(ptrs, value, mask, *rest)

        def atomic_rmw(op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
            self._memory.atomic(ptr.data, mask.data, val.data.itemsize)  # type: ignore[union-attr]  # within a launch
            return rmw(op, ptr, val, mask, *rest)

        def atomic_cas(ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
            self._memory.atomic(ptr.data, np.ones_like(ptr.data, dtype=bool), val.data.itemsize)  # type: ignore[union-attr]  # within a launch
            return cas(ptr, cmp, val, *rest)

        def counted_dot(a: Any, b: Any, *rest: Any) -> Any:
            self._products += 2 * a.data.size * b.data.shape[-1]
            return dot(_widened(builder, a), _widened(builder, b), *rest)

        builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
        builder.create_atomic_rmw, builder.create_atomic_cas = atomic_rmw, atomic_cas
        builder.create_dot = counted_dot
        for name in _COUNTED:
            setattr(builder, name, self._counted(getattr(builder, name)))

    def _counted(self, operation: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            result = operation(*args, **kwargs)
            if result.data.dtype.kind == "f":  # arithmetic of addresses is not what a kernel waits for
                self._flops += result.data.size
            return result

        return count


def _chosen(n_programs: int, samples: int | None) -> list[int]:
    """Return the programs of a launch that are run: all, or some spread over it."""
    if samples is None or n_programs <= samples:
        return list(range(n_programs))
    return sorted({round(one * (n_programs - 1) / (samples - 1)) for one in range(samples)})


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a kernel's argument, those in a tensor descriptor among them."""
    base = getattr(value, "base", None)
    return tensors_of(value) or ([base] if isinstance(base, Tensor) else [])


def _widened(builder: Any, factor: Any) -> Any:
    """Return a factor of a product, in float32 where it is bfloat16: the interpreter would multiply its bits (triton 3.8)."""
    return builder.cast_impl(factor, language.float32) if factor.dtype.scalar is language.bfloat16 else factor


def _size(ptrs: Any) -> int:
    """Return the bytes of what pointers point to."""
    return max(1, int(ptrs.get_element_ty().primitive_bitwidth) // 8)
