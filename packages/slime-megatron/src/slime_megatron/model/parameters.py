"""Which tensors are a model's weights. Imports torch, and not megatron."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

#: Suffix of the names of buffers that belong to a model's weights.
_BUFFER = ".router.expert_bias"
#: Prefix of the names of MTP weights.
MTP = "mtp."


def named_weights(model: Module) -> dict[str, Tensor]:
    """Return the parameters of this rank and the buffers that belong to its weights, by Megatron's own names."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(_BUFFER)}
    return dict(model.named_parameters()) | buffers
