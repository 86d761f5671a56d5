"""What a learner's tensors take: of rank jobs and of tests, which import it in different ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slime_megatron.learner.learner import Learner


def bytes_of(learner: Learner) -> tuple[int, int, int]:
    """Return bytes of weights, of gradient buffers, and of moments and weights that are not the model's own."""
    model, wrapped = learner.model, learner._policy.model
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    optimizer = learner._policy.optimizer
    states = [
        pair
        for each in getattr(optimizer, "chained_optimizers", [optimizer])
        for pair in each.optimizer.state.items()
    ]
    moments = [
        tensor for _, state in states for tensor in state.values() if torch.is_tensor(tensor) and tensor.dim()
    ]
    masters = [parameter for parameter, _ in states if parameter.untyped_storage().data_ptr() not in own]
    gradients = [buffer.grad_data for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]
    sizes = [sum(tensor.nbytes for tensor in each) for each in (gradients, moments + masters)]
    return weight_bytes(model), sizes[0], sizes[1]


def weight_bytes(model: torch.nn.Module) -> int:
    """Return bytes of a model's parameters, and of its buffers but those that only count tokens."""
    saved = model.state_dict()
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *buffers))
