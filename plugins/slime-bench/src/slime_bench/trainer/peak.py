"""The peak FLOP/s of a device, published or measured, of which MFU is a share."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from slime_models.cpu import product

#: Name of a device, as torch gives it -> dense bfloat16 TFLOP/s of its data sheet (those with sparsity halved).
PUBLISHED = {
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H200": 989.4,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
}
#: Rows and columns of the matrices that are multiplied where there is no such figure, by kind of device.
_SIZE = {"cpu": 2048, "cuda": 8192}


@dataclass
class Peak:
    """A device's peak: given, published, or the fastest matrix product so far."""

    device: torch.device
    """Which."""
    flops_per_s: float
    """What it is."""
    products: int = 0
    """Matrix products timed for it; 0 where it is known without."""
    given: bool = False
    """Whether the caller named it."""

    @classmethod
    def of(cls, device: torch.device, given_tflops: float | None) -> Peak:
        """Return the peak that was given, else the published one, else one that `observe` is to find."""
        if given_tflops is not None:
            return cls(device, given_tflops * 1e12, given=True)
        found = cls(device, PUBLISHED.get(device_name(device), 0.0) * 1e12)
        if not found.known:
            found._multiply()  # warms up
        return found

    @property
    def known(self) -> bool:
        """Whether no product has to be timed."""
        return self.flops_per_s > 0 and self.products == 0

    @property
    def source(self) -> str:
        """Where the figure is from."""
        if self.given:
            return "given by --peak-tflops"
        if self.known:
            return f"published for {device_name(self.device)}, dense bfloat16"
        size = _SIZE[self.device.type]
        return f"the fastest of {self.products} bfloat16 products of two {size} x {size} matrices in this run"

    def observe(self) -> None:
        """Time a product where the peak is not known; keep the fastest."""
        if not self.known:
            size = _SIZE[self.device.type]
            self.flops_per_s = max(self.flops_per_s, 2 * size**3 / self._multiply())
            self.products += 1

    def _multiply(self) -> float:
        """Return the seconds of one product."""
        size = _SIZE[self.device.type]
        matrix = torch.randn(size, size, device=self.device).bfloat16()
        other, out = matrix.t().contiguous(), torch.empty_like(matrix)
        finish(self.device)
        start = time.perf_counter()
        product(matrix, other, out=out)
        finish(self.device)
        return time.perf_counter() - start


def device_name(device: torch.device) -> str:
    """Return what torch calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
