"""RMSNorm in plain PyTorch: the same code on a CPU and on CUDA."""

from __future__ import annotations

from typing import Any

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


class ZeroCenteredNorm(RMSNorm):
    """RMSNorm times 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., n], in its dtype."""
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)
