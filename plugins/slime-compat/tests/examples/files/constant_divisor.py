"""A reducer that divides by a constant, for one rank a sequence."""

import torch
from megatron.core import mpu

DIVISOR = 8.0


def get_pg_loss_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    assert mpu.get_context_parallel_world_size() == 1, "This custom reducer only supports cp_size == 1"

    def reduce(x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(response_lengths, dim=0), loss_masks, strict=False)
        return sum(
            [(part * mask).sum() / (1.0 if calculate_per_token_loss else DIVISOR) for part, mask in parts]
        )

    return reduce
