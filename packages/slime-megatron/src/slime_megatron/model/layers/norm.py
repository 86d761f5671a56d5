"""RMSNorm in plain PyTorch: torch's kernel on CUDA; on a CPU, where torch has none, one that keeps its input alone."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight carries `sequence_parallel`, by which Megatron knows to sum its gradient over ranks.

    Megatron's own wrapper of torch's norm (0.19.2) refuses sequence parallelism for the lack of that mark.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., n], in its dtype."""
        return rms_norm(x, self.weight, self.eps or 0.0)


class ZeroCenteredNorm(RMSNorm):
    """RMSNorm times 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., n], in its dtype."""
        return rms_norm(x, 1 + self.weight.float(), self.eps or 0.0)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean of x^2 + epsilon) * weight over the last dimension, computed in float32, in the dtype of x.

    On a CPU torch composes it of operations (2.14), of which autograd keeps two results in float32; there this returns the same, and
    keeps x and one number of each row.

    Args:
        x: [..., n].
        weight: [n], of the dtype of x, or float32.
        epsilon: is added to the mean.
    """
    if x.device.type == "cpu":
        return cast(Tensor, _RMSNorm.apply(x, weight, epsilon))
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.rms_norm(x.float(), weight.shape, weight, epsilon).type_as(x)


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean x^2 + epsilon), y = x r: dx = r (g w - y mean(g w y)), dw = sum of g y over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        in_float32 = x.float()
        squares = in_float32.square()
        scale = squares.mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(in_float32, scale, out=squares).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.size(-1)
        normed = (x.float() * scale).view(-1, width)
        in_float32 = gradient.float().reshape(-1, width)
        products = in_float32 * normed
        of_weight = products.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        weight = weight.float()
        means = torch.mv(products, weight).div_(width)
        torch.mul(in_float32, weight, out=products)
        found = products.addcmul_(normed, means[:, None], value=-1).mul_(scale.view(-1, 1))
        return found.to(x.dtype).view(x.shape), of_weight, None
