"""`Norm`: RMSNorm, by a compiled kernel or in place on a CPU, and by PyTorch's kernel on CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from slime_models.jit import compiled
from torch import Tensor
from torch.nn import functional as F

from slime_torch.kernels.launch import Kernel
from slime_torch.storage.weights import Fused, Shape


class Norm(Fused):
    """The weight of an RMS norm.

    CUDA has a kernel for it. PyTorch has none for a CPU: ours is taken where it can be compiled, and otherwise what it takes is
    done in float32 and in place, of the ways measured in a step of 64 rows the fastest.

    Args:
        name: of its one tensor.
        shape: [n].
        epsilon: added to the mean square.
        dtype: storage dtype.
        device: where it lives.
        compile_kernel: use a compiled kernel (`kernels.launch.can_compile`; on a CPU, bfloat16 or float32).
        order: for each place, the number of the weight that is stored there; None for the folder's.
        offset: added to the weight: what is multiplied by is their sum, in float32.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        *,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
        compile_kernel: bool = False,
        order: Sequence[int] | None = None,
        offset: float = 0.0,
    ) -> None:
        orders = None if order is None else {name: order}
        super().__init__({name: shape}, dtype=dtype, device=device, orders=orders)
        self.epsilon = epsilon
        """Added to the mean square."""
        self._offset = offset
        self._has_kernel = device.type == "cuda"
        self._epsilon_tensor, self._share = torch.tensor(epsilon), 1 / shape[0]
        self._weight = self.tensor.float() + offset
        self._kernel = self._compiled() if compile_kernel else None

    @property
    def weight(self) -> Tensor:
        """What is multiplied by, float32 [n]."""
        return self._weight

    @property
    def weight_address(self) -> int:
        """Where what is multiplied by lies, as float32."""
        return self._weight.data_ptr()

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weight in, casting it."""
        super().write(tensors)
        self._weight.copy_(self.tensor).add_(self._offset)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [..., n]."""
        if self._kernel is not None:
            return self._run(self._kernel, x.contiguous())
        if self._has_kernel and self._offset:
            return F.rms_norm(x.float(), self.shape, self._weight, self.epsilon).to(x.dtype)
        if self._has_kernel:
            return F.rms_norm(x, self.shape, self.tensor, self.epsilon)
        y = x.to(torch.float32, copy=True)
        scale = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        torch.addcmul(self._epsilon_tensor, scale, scale, value=self._share, out=scale)
        return y.mul_(scale.rsqrt_()).mul_(self._weight).to(x.dtype)

    def _compiled(self) -> Kernel:
        from slime_torch.kernels.compiled import norm_kernel

        kernel = Kernel(compiled(norm_kernel, self.tensor.itemsize), words=7)
        kernel.set(2, self.shape[0])
        kernel.set(4, self.weight_address)
        kernel.set_float(6, self.epsilon)
        return kernel

    def _run(self, kernel: Kernel, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel.set(1, x.numel() // self.shape[0])
        kernel.set(3, x.data_ptr())
        kernel.set(5, out.data_ptr())
        kernel.run()
        return out
