"""The number of optimizer steps in a state to be saved, on which all ranks agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slime_megatron.optim.optimizer import level_steps, parts_of, step_of
from slime_megatron.parallel.process_groups import device


def agree_on_steps(saved: dict[Any, Any]) -> None:
    """Give a state to be saved the number of steps of the ranks that have taken them. Collective over the world.

    Rank 0 writes it for all, and its pipeline stage may have nothing that is trained, such as experts or MTP layers.

    Args:
        saved: of the optimizer, sharded. Changed here.
    """
    parts = parts_of(saved)
    most = torch.tensor(max(map(step_of, parts)), dtype=torch.float64, device=device())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for part in parts:
        if step_of(part) == most.item():
            continue
        if "param_state" in part:  # of a distributed optimizer
            part["optimizer"]["param_groups"][0]["step"] = int(most)
            level_steps(part)
        else:
            part.get("optimizer", part)["state"]["common_step"] = torch.tensor(float(most))
