"""`ReplicatedLinear`: a projection that every tensor-parallel rank has whole."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.cpu import product
from torch import Tensor


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without a bias whose ranks hold the same weight, each for its own tokens under sequence parallelism.

    Megatron has one in TransformerEngine alone; its local layers cut such projections by rows and gather what they give, and
    then lose the gradient that other ranks' heads have of it (`MLASelfAttention` of 0.19.2).
    """

    #: Megatron's layers say whether they are an expert's.
    is_expert = False

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return x [..., inputs] times the weight, [..., outputs], and no bias, as Megatron's layers do."""
        return product(x, self.weight.t()), None
