"""`open_weights`: the weights of a Hugging Face folder, dequantised where it is quantised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from slime_core.errors import CheckpointError
from torch import Tensor

from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint
from slime_models.hf.stacked import Stacked, UnstackedCheckpoint
from slime_models.quantization.config import read_quantization
from slime_models.quantization.scheme import WEIGHT, Quantization
from slime_models.tensor_spec import Shape


def open_weights(folder: Path | str, *, stacked: Stacked | None = None) -> HfCheckpoint:
    """Return the weights of a folder; those that are quantised are dequantised when they are asked for.

    Args:
        folder: Hugging Face folder.
        stacked: tensors that hold those of all experts, where each is to be named by itself: the family's (`ModelFamily.stacked`).

    Raises:
        CheckpointError: a file is missing or corrupt, or a quantised matrix has no scales; names it.
        DataError: config.json asks for a quantisation that is not supported; names the field.
    """
    config = read_config(Path(folder))
    quantization = read_quantization(config)
    if quantization is None:
        return UnstackedCheckpoint(folder, stacked) if stacked else HfCheckpoint(folder)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    return DequantizedCheckpoint(folder, quantization, dtype=dtype)


class DequantizedCheckpoint(HfCheckpoint):
    """The weights of a quantised folder under the names of the model's, each matrix dequantised in float32 and rounded once.

    Which matrices are quantised is seen by their scales.

    Args:
        folder: Hugging Face folder.
        quantization: what its config.json says.
        dtype: of dequantised matrices.

    Raises:
        CheckpointError: as HfCheckpoint, and where a float8 matrix has no scales; names it.
    """

    def __init__(self, folder: Path | str, quantization: Quantization, *, dtype: torch.dtype) -> None:
        super().__init__(folder)
        self._quantization, self._dtype = quantization, dtype
        scale = f".{quantization.scale}"
        held = list(super().__iter__())
        modules = [name.removesuffix(scale) for name in held if name.endswith(scale)]
        hidden = {part for module in modules for part in quantization.parts(module)}
        self._quantized = {module + WEIGHT for module in modules}
        names = [name for name in held if name not in hidden] + sorted(self._quantized)
        self._names = dict.fromkeys(names)
        missing = sorted(hidden - set(held))
        if missing:
            raise CheckpointError(f"{self.folder}: {missing[0]}: missing beside its scales; fetch it again")

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, dequantised if need be."""
        if name not in self._quantized:
            tensor = super().__getitem__(name)
            if tensor.dtype is torch.float8_e4m3fn:
                raise CheckpointError(
                    f"{self.folder}: {name}: float8 without {self._quantization.scale}; fetch it again"
                )
            return tensor
        held = {part: HfCheckpoint.__getitem__(self, part) for part in self._parts(name)}
        return self._quantization.dequantized(name, held).to(self._dtype)

    def __contains__(self, name: object) -> bool:
        """Return whether the model has the tensor, without reading it."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._names)

    def shape(self, name: str) -> Shape:
        """Return the shape of one tensor, without dequantising it."""
        if name not in self._quantized:
            return super().shape(name)
        return self._quantization.shape(
            name, {part: HfCheckpoint.__getitem__(self, part) for part in self._parts(name)}
        )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor, without dequantising it."""
        return self._dtype if name in self._quantized else super().dtype(name)

    def _parts(self, name: str) -> tuple[str, ...]:
        return self._quantization.parts(name.removesuffix(WEIGHT))
