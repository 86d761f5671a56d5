"""SGLang's platform for a machine without a GPU and without the kernels of `sgl_kernel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from slime_sglang.inside.compat import install_in_worker

if TYPE_CHECKING:  # SGLang imports this module while its own is half imported
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.server_args import ServerArgs


class TorchPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is untyped
    """Plain PyTorch on the CPU.

    SGLang's own CPU platform calls kernels that its CUDA wheel does not carry. An out-of-tree platform is asked
    which implementation to take instead, and this one answers with PyTorch's every time. Memory, device and
    collectives (gloo) are those of SGLang's CPU mixin.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()  # neither Triton nor graphs

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Choose the device: SGLang finds none by itself where there is no accelerator."""
        server_args.device = "cpu"

    def init_backend(self) -> None:
        """Patch what this process computes with; SGLang calls this in each that has a model."""
        install_in_worker()

    def get_default_attention_backend(self) -> str:
        """Return the attention that is written in PyTorch."""
        return "torch_native"

    def get_quantization_config(self, quantization: str) -> type[QuantizationConfig] | None:
        """Return the configuration of a method that is computed in PyTorch; None leaves it to SGLang, which has kernels."""
        from slime_sglang.inside.quantized_cpu import CONFIGS

        return CONFIGS.get(quantization)

    def get_dispatch_key_name(self) -> str:
        """Return the key of the layers' PyTorch forms, `forward_native`."""
        return "native"
