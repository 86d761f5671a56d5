"""The engine's weights: a few Hugging Face tensors fused into each tensor that the model multiplies by.

An update writes into them by Hugging Face name, one fused tensor at a time. There is one copy, but for tied weights in a
packed layout (see `can_pack`): rows of the embedding cannot be looked up in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from slime_core.errors import WeightSyncError
from slime_models.transfer.fingerprint import fingerprints
from torch import Tensor
from torch.nn import functional as F

from slime_torch.storage.huge_pages import collapse

Shape = tuple[int, ...]
#: What is done to a product before it is stored, by oneDNN's names.
PostOp = Literal["none", "swish", "add", "mul"]

_PACKING = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN's blocked weight layout is of use: bfloat16 on a CPU that multiplies it natively.

    With a plain layout oneDNN reorders the weight in every product, which takes two thirds as long as the rest
    when the batch is small (measured: 26 instead of 16 ms for SmolLM2-135M's layers and one token). A product is
    the same, bit for bit; what follows it (`Fused.linear`) is done before the result is rounded, not after.
    """
    ops = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and all(hasattr(ops, name) for name in _PACKING)
        and bool(ops._is_mkldnn_bf16_supported())
    )


class Fused:
    """Hugging Face tensors that lie one above the other in a single tensor.

    Args:
        parts: name -> shape; all dimensions but the first must agree.
        dtype: storage dtype.
        device: where the tensor lives.
        packed: keep oneDNN's blocked layout (a matrix that is only multiplied by).
        orders: of parts whose rows are stored in another order: name -> for each place, the row of the part that is there.
    """

    def __init__(
        self,
        parts: Mapping[str, Shape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool = False,
        orders: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.parts = dict(parts)
        self._orders = {name: torch.tensor(order) for name, order in (orders or {}).items()}
        self.packed = packed
        if packed:
            self._product = torch.ops.mkldnn._linear_pointwise.default
            self._product_with = torch.ops.mkldnn._linear_pointwise.binary
        self._rows: dict[str, slice] = {}
        total = 0
        for name, shape in parts.items():
            self._rows[name] = slice(total, total + shape[0])
            total += shape[0]
        self.shape: Shape = (total, *next(iter(parts.values()))[1:])
        self.tensor = torch.zeros(self.shape, dtype=dtype, device=device)

    def plain(self) -> Tensor:
        """Return the tensor in row-major layout: itself, or an unpacked copy."""
        return self.tensor.to_dense() if self.tensor.is_mkldnn else self.tensor

    def read(self) -> dict[str, Tensor]:
        """Return name -> tensor; views of what `plain` returns, or copies of parts in another order."""
        plain = self.plain()
        return {
            name: plain[rows] if name not in self._orders else plain[rows][self._orders[name].argsort()]
            for name, rows in self._rows.items()
        }

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy some of the parts in, casting them."""
        is_whole = self.packed and len(tensors) == len(self.parts)  # nothing of what is there is needed
        plain = torch.empty(self.shape, dtype=self.tensor.dtype) if is_whole else self.plain()
        for name, tensor in tensors.items():
            ordered = tensor if name not in self._orders else tensor[self._orders[name]]
            plain[self._rows[name]].copy_(ordered)
        if self.packed:
            ops = torch.ops.mkldnn
            self.tensor = ops._reorder_linear_weight(plain)
            collapse(ops.data_ptr(self.tensor), ops._nbytes(self.tensor))

    def linear(
        self, x: Tensor, bias: Fused | None = None, *, then: PostOp = "none", other: Tensor | None = None
    ) -> Tensor:
        """Return x W^T + bias, [n, columns] -> [n, rows], after `then`; `other` is what that adds, which may be overwritten, or multiplies by."""
        b = None if bias is None else bias.tensor
        if self.packed:
            y: Tensor
            if other is None:
                y = self._product(x, self.tensor, b, then, [], "")
            else:
                y = self._product_with(x, other, self.tensor, b, then)
            return y
        if then == "add" and x.is_cuda and b is None and other is not None and other.dtype == x.dtype:
            return other.addmm_(x, self.tensor.t())  # one kernel, and rounded once
        y = F.linear(x, self.tensor, b)
        if then == "none":
            return y
        if then == "swish":
            return F.silu(y, inplace=True)
        assert other is not None, f"{then} without a second operand"
        return y.add_(other) if then == "add" else y.mul_(other)

    def move(self, device: torch.device) -> None:
        """Move to `device`; a packed tensor stays, it is on the CPU anyway."""
        if not self.packed:
            self.tensor = self.tensor.to(device)


class Weights:
    """All weights of a model by Hugging Face name.

    Args:
        fused: every tensor of the model; a name that two of them have is kept the same in both.
    """

    def __init__(self, fused: Iterable[Fused]) -> None:
        self._fused = list(fused)
        self._shapes = {name: shape for one in self._fused for name, shape in one.parts.items()}
        self._dtypes = {name: one.tensor.dtype for one in self._fused for name in one.parts}
        self._holders: dict[str, list[Fused]] = {}
        for one in self._fused:
            for name in one.parts:
                self._holders.setdefault(name, []).append(one)

    def __len__(self) -> int:
        """Return the number of Hugging Face tensors."""
        return len(self._shapes)

    def shapes(self) -> dict[str, Shape]:
        """Return name -> shape."""
        return dict(self._shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill all weights from `tensors`, which is read one fused tensor at a time."""
        for fused in self._fused:
            fused.write({name: tensors[name] for name in fused.parts})

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy some tensors in; `check` them first."""
        parts: dict[Fused, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            for fused in self._holders[name]:
                parts.setdefault(fused, {})[name] = tensor
        for fused, of_it in parts.items():
            fused.write(of_it)

    def check(self, name: str, tensor: Tensor, *, version: str) -> None:
        """Check that `tensor` can be written as `name`.

        Raises:
            WeightSyncError: the name is unknown, or shape or dtype are not the engine's.
        """
        where = f"update to version {version}: {name}"
        wanted = self._shapes.get(name)
        if wanted is None:
            raise WeightSyncError(
                f"{where}: the engine's model has no such tensor; send its {len(self)} tensors only"
            )
        if tuple(tensor.shape) != wanted:
            raise WeightSyncError(f"{where}: found shape {tuple(tensor.shape)}; wanted {wanted}")
        dtype = self._dtypes[name]
        if tensor.dtype != dtype:
            raise WeightSyncError(
                f"{where}: found dtype {tensor.dtype}; wanted {dtype}; cast it to the plan's dtype"
            )

    def fingerprint(self) -> dict[str, int]:
        """Return name -> checksum of what is stored now.

        Raises:
            WeightSyncError: a name that is stored twice is not the same in both places.
        """
        names: list[str] = []

        def parts() -> Iterator[Tensor]:
            for fused in self._fused:
                for name, part in fused.read().items():
                    names.append(name)
                    yield part

        values = fingerprints(parts())
        found = dict(zip(names, values, strict=True))
        for name, value in zip(names, values, strict=True):
            if found[name] != value:
                raise WeightSyncError(f"{name}: its two copies in the engine differ")
        return found

    def addresses(self) -> tuple[int, ...]:
        """Return where everything lies, what is derived from weights, too; not of packed tensors."""
        held = (value for fused in self._fused for value in vars(fused).values() if isinstance(value, Tensor))
        return tuple(tensor.data_ptr() for tensor in held)

    def move(self, device: torch.device) -> None:
        """Move everything to `device`."""
        for fused in self._fused:
            fused.move(device)
