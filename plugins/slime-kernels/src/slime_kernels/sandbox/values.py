"""Tensors and the values around them as JSON and bytes, inside the processes of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: In place of bytes: a tensor of this type and shape whose content does not matter.
SHAPE_ONLY = "shape"


class InputsError(Exception):
    """A problem's inputs cannot be made."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def encode(value: Any, buffers: list[bytes], *, content: bool = True) -> Any:
    """Return a value as JSON, its tensors' bytes appended to `buffers`, or only their shapes.

    Raises:
        TypeError: it is, or holds, neither tensor nor plain value.
    """
    if isinstance(value, Tensor):
        form: dict[str, Any] = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        if not content:
            return form | {"buffer": SHAPE_ONLY}
        plain = value.detach().cpu().contiguous().reshape(-1)
        buffers.append(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        return form | {"buffer": len(buffers) - 1}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(one, buffers, content=content) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__}; wanted tensors, numbers, text, or lists of them")


def decode(form: Any, buffers: Sequence[bytes]) -> Any:
    """Return the value that `encode` wrote; tensors have memory of their own.

    Raises:
        InputsError: there is no memory for one of which only the shape is known.
    """
    if "value" in form:
        return form["value"]
    if "list" in form:
        return [decode(one, buffers) for one in form["list"]]
    if "tuple" in form:
        return tuple(decode(one, buffers) for one in form["tuple"])
    dtype: torch.dtype = getattr(torch, form["dtype"])
    if form["buffer"] == SHAPE_ONLY:
        try:
            empty = torch.empty(form["shape"], dtype=dtype)
        except RuntimeError as error:
            what = f"{form['dtype']} of shape {form['shape']}"
            raise InputsError(
                f"this machine has no memory for the problem's inputs at its own size, {what}; make it smaller, or evaluate elsewhere"
            ) from error
        return empty if dtype.is_floating_point else empty.zero_()  # indices must lie within bounds
    content = buffers[form["buffer"]]
    if not content:
        return torch.empty(form["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(form["shape"])


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_of(one)]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in tensors_of(one)]
    return []
