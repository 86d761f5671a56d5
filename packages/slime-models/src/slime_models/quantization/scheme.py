"""`Quantization`: which tensors a `quantization_config` quantises, and the tensors that it makes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from slime_core.errors import WeightSyncError
from torch import Tensor

from slime_models.quantization.blocks import (
    PER_WORD,
    dequantize_fp8,
    dequantize_int4,
    n_blocks,
    quantize_fp8,
    quantize_int4,
)
from slime_models.tensor_spec import Shape, Spec

#: Last parts of the names of modules whose matrix may be quantised: those of attention, MLP and experts. Embeddings, the
#: output layer, routers and norms never are.
#: MiniMax-M2 calls gate, down and up of an expert by numbers.
LINEAR_LAYERS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    | {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk"}
)
#: How the names of matrices end.
WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which matrices are quantised, and how; see `blocks` for what a block is."""

    bits: Literal[4, 8]
    """8: float8 e4m3. 4: integers from -8 to 7, packed."""
    rows: int | None
    """Rows of a block; None for all rows of the matrix."""
    columns: int | None
    """Columns of a block; None for all columns of the matrix."""
    scale: str
    """Last part of the name of a matrix's scales."""
    power_of_two: bool = False
    """Whether scales are powers of 2."""
    ignores: Callable[[str], bool] = lambda module: False
    """Whether a module is left unquantised, though it is one of `LINEAR_LAYERS`."""

    def covers(self, name: str, shape: Shape) -> bool:
        """Return whether a tensor of the trainer's model is quantised."""
        module = name.removesuffix(WEIGHT)
        is_linear = name.endswith(WEIGHT) and module.rpartition(".")[2] in LINEAR_LAYERS
        return is_linear and len(shape) == 2 and not self.ignores(module)

    def specs(self, name: str, shape: Shape, dtype: str) -> Iterator[tuple[str, Spec]]:
        """Yield (name, spec) of each tensor that the engine holds in place of one that this `covers`.

        Args:
            name: of the trainer's tensor.
            shape: of the trainer's tensor.
            dtype: of unquantised tensors, as torch spells it; the scales of `int4` have it too.
        """
        module = name.removesuffix(WEIGHT)
        down, across = n_blocks(shape, self.rows, self.columns)
        if self.bits == 8:
            of_scales = (1,) if self._is_whole else (down, across)
            yield name, Spec(shape=shape, dtype="float8_e4m3fn")
            yield f"{module}.{self.scale}", Spec(shape=of_scales, dtype="float32")
            return
        yield f"{module}.weight_packed", Spec(shape=(shape[0], -(-shape[1] // PER_WORD)), dtype="int32")
        yield f"{module}.{self.scale}", Spec(shape=(down, across), dtype=dtype)
        yield f"{module}.weight_shape", Spec(shape=(2,), dtype="int64")

    def parts(self, module: str) -> tuple[str, ...]:
        """Return the names of the tensors that a quantised module has in the place of its weight."""
        if self.bits == 8:
            return (f"{module}{WEIGHT}", f"{module}.{self.scale}")
        return (f"{module}.weight_packed", f"{module}.{self.scale}", f"{module}.weight_shape")

    def shape(self, name: str, held: Mapping[str, Tensor]) -> Shape:
        """Return the shape of a matrix of `dequantized`, without computing it."""
        if self.bits == 8:
            return tuple(held[name].shape)
        rows, columns = held[f"{name.removesuffix(WEIGHT)}.weight_shape"].tolist()
        return rows, columns

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) pairs that are sent in place of one of the trainer's tensors that this `covers`.

        Raises:
            WeightSyncError: it holds inf or nan, or does not fit the groups; names it.
        """
        module = name.removesuffix(WEIGHT)
        try:
            if self.bits == 8:
                codes, scales = quantize_fp8(
                    tensor, rows=self.rows, columns=self.columns, power_of_two=self.power_of_two
                )
                yield name, codes
                yield f"{module}.{self.scale}", scales.reshape(1) if self._is_whole else scales
                return
            group_size = self.columns or tensor.shape[1]
            packed, scales = quantize_int4(tensor, group_size=group_size, dtype=tensor.dtype)
        except ValueError as error:
            raise WeightSyncError(f"{name}: cannot be quantised: {error}") from error
        yield f"{module}.weight_packed", packed
        yield f"{module}.{self.scale}", scales
        yield f"{module}.weight_shape", torch.tensor(tensor.shape)

    def dequantized(self, name: str, held: Mapping[str, Tensor]) -> Tensor:
        """Return the dequantised float32 matrix of one of the trainer's tensors that this `covers`.

        Args:
            name: of the trainer's tensor.
            held: the engine's tensors by name, those that `specs` yields for `name` among them.
        """
        module = name.removesuffix(WEIGHT)
        scales = held[f"{module}.{self.scale}"]
        if self.bits == 8:
            tiles = scales if scales.dim() == 2 else scales.reshape(1, 1)
            return dequantize_fp8(held[name], tiles, rows=self.rows, columns=self.columns)
        columns = int(held[f"{module}.weight_shape"][1])
        return dequantize_int4(held[f"{module}.weight_packed"], scales, columns=columns)

    @property
    def _is_whole(self) -> bool:
        """Whether a matrix has a single scale."""
        return self.rows is None and self.columns is None


def specs_of(
    shapes: Mapping[str, Shape],
    *,
    dtype: str,
    float32: frozenset[str] = frozenset(),
    quantization: Quantization | None = None,
) -> dict[str, Spec]:
    """Return name -> spec of every tensor that an engine holds of a model, by Hugging Face name.

    Args:
        shapes: of the trainer's tensors.
        dtype: of unquantised tensors, as torch spells it.
        float32: names of tensors that are float32 whatever `dtype` is.
        quantization: of the engine's model; None where it is not quantised.
    """
    specs: dict[str, Spec] = {}
    for name, shape in shapes.items():
        if quantization is not None and quantization.covers(name, shape):
            specs |= quantization.specs(name, shape, dtype)
        else:
            specs[name] = Spec(shape=shape, dtype="float32" if name in float32 else dtype)
    return specs
