"""SGLang's quantised layers on plain PyTorch: parameters are made and loaded by SGLang, and multiplied dequantised.

`TorchPlatform` hands these configurations out. A server keeps the quantised parameters as they arrive, which is what
updates are proven on, and beside them the matrices that they stand for, in the server's dtype. Activations stay as they are:
on a GPU SGLang's kernels for float8 quantise them, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
from slime_models.quantization.blocks import PER_WORD, dequantize_int4
from torch import Tensor

# Layers are modules of SGLang, which hangs parameters and settings of its own on them: `Any` in the signatures below.
#: SGLang's own configurations lack float32, which only their kernels cannot compute.
_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Fp8LinearMethod(fp8.Fp8LinearMethod):  # type: ignore[misc]  # SGLang is untyped
    """A linear layer of float8. SGLang chooses how to load a layer by this class's name, so it is that of its own."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantise what has been loaded."""
        layer.dequantized = dequantized(layer, self.weight_block_size)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply."""
        return torch.nn.functional.linear(x, layer.dequantized, bias)


class TorchFp8MoEMethod(fp8.Fp8MoEMethod):  # type: ignore[misc]  # SGLang is untyped
    """Experts of float8 by blocks."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantise what has been loaded."""
        block, dtype = self.weight_block_size, self.moe_runner_config.params_dtype
        layer.dequantized = SimpleNamespace(
            num_experts=layer.num_experts,
            w13_weight=block_quant_dequant(layer.w13_weight, layer.w13_weight_scale_inv, block, dtype),
            w2_weight=block_quant_dequant(layer.w2_weight, layer.w2_weight_scale_inv, block, dtype),
        )

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """Send each token through its experts."""
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        return StandardCombineInput(moe_forward_native(layer.dequantized, x, topk, self.moe_runner_config))


class TorchFp8Config(Fp8Config):  # type: ignore[misc]  # SGLang is untyped
    """The method `fp8`: a scale for each block or tensor."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes that a server may have."""
        return _DTYPES

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return what a layer is computed by.

        Raises:
            NotImplementedError: it has experts, and not blocks.
        """
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, fp8.Fp8MoEMethod):
            if self.weight_block_size is None:
                raise NotImplementedError(_NO_EXPERTS.format(prefix))
            return TorchFp8MoEMethod(self)
        return Fp8LinearMethod(self) if isinstance(method, fp8.Fp8LinearMethod) else method


class DequantizedScheme:
    """A scheme of compressed-tensors whose layers multiply dequantised."""

    requires_weight_loader_v2 = False

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme

    def create_weights(self, layer: Any, **sizes: Any) -> None:
        """Make the layer's parameters."""
        self._scheme.create_weights(layer=layer, **sizes)
        layer.logical_widths = sizes["output_partition_sizes"]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantise what has been loaded."""
        layer.dequantized = dequantized(layer)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply."""
        return torch.nn.functional.linear(x, layer.dequantized, bias)


class TorchCompressedTensorsConfig(CompressedTensorsConfig):  # type: ignore[misc]  # SGLang is untyped
    """The method `compressed-tensors`: float8 by tensor or channel, integers of 4 bits by group."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes that a server may have."""
        return _DTYPES

    def get_linear_scheme(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a linear layer is computed by; None where it is not quantised."""
        scheme = super().get_linear_scheme(*args, **kwargs)
        return None if scheme is None else DequantizedScheme(scheme)

    def get_moe_scheme(self, layer: Any, layer_name: str | None = None) -> Any:
        """Return what a layer's experts are computed by: nothing.

        Raises:
            NotImplementedError: they are quantised.
        """
        if super().get_scheme_dict(layer, f"{layer_name}.0.gate_proj") is not None:
            raise NotImplementedError(_NO_EXPERTS.format(layer_name))

    def _check_scheme_supported(self, min_capability: int, error: bool = True) -> bool:
        return True  # asks CUDA what the GPU can do


_NO_EXPERTS = (
    "{}: quantised experts are not computed without a GPU; leave them as they are (--ignore experts)"
)

#: SGLang's name of a method -> its configuration without a GPU.
CONFIGS: dict[str, type[QuantizationConfig]] = {
    "fp8": TorchFp8Config,
    "compressed-tensors": TorchCompressedTensorsConfig,
}


def dequantized(layer: Any, block_size: list[int] | None = None) -> Tensor:
    """Return the matrix that the parameters of a quantised layer stand for, in the layer's dtype."""
    dtype: torch.dtype = layer.params_dtype
    matrix: Tensor
    if hasattr(layer, "weight_packed"):
        columns = layer.weight_packed.shape[1] * PER_WORD
        return dequantize_int4(layer.weight_packed, layer.weight_scale, columns=columns).to(dtype)
    if block_size is not None:
        matrix = block_quant_dequant(layer.weight, layer.weight_scale_inv, block_size, dtype)
        return matrix
    scales: Tensor = layer.weight_scale
    if scales.dim() == 1:  # one for each matrix that is stacked in this one
        scales = scales.repeat_interleave(torch.tensor(layer.logical_widths))[:, None]
    matrix = layer.weight.float() * scales
    return matrix.to(dtype)
