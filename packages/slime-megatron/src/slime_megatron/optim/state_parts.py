"""Each rank's part of the state of an optimizer that data-parallel ranks share, of which the first of them has read all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from slime_megatron.optim.master_weights import made_of, not_made_of
from slime_megatron.parallel.process_groups import device


@torch.no_grad()
def share_out(optimizer: Any, whole: dict[int, dict[str, Tensor]]) -> list[Tensor]:
    """Set each rank's part of master weights and moments; return the parameters that are not made of their master weights.

    Collective over the ranks that share the optimizer, each of which knows of its own parts.

    One parameter after another is sent through the device's memory: all of the state is on the first rank's host alone.

    Args:
        optimizer: Megatron's distributed one.
        whole: number of a parameter, in the order of the optimizer's buffers -> its float32 tensors, `param` and moments, on the
            first rank; nothing on the others. Emptied, to give its memory back meanwhile.

    Source: `load_parameter_state_from_fully_reshardable` of megatron-core 0.19.2, for which each rank has read all of it.
    """
    if optimizer.is_stub_optimizer:
        return []
    compared: list[tuple[Tensor, Tensor]] = []
    group, number = optimizer.data_parallel_group, 0
    first = dist.get_global_rank(group, 0)
    hybrid = isinstance(
        optimizer.optimizer, HybridDeviceOptimizer
    )  # it keeps what it is given, and not on the device
    kept_on = torch.device("cpu") if hybrid else device()
    for buffer, of_dtypes in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        maps = [bucket["param_map"] for buckets in of_dtypes.values() for bucket in buckets]
        own = {weight: ranges["param"] for each in maps for weight, ranges in each.items()}
        for weight in buffer.param_index_map:
            read, part = whole.pop(number, {}), {}
            for name in ("param", *optimizer.optimizer_state_keys):
                if group.rank() == 0:
                    tensor = read[name].flatten().to(device())
                else:
                    tensor = torch.empty(weight.numel(), dtype=torch.float32, device=device())
                dist.broadcast(tensor, first, group=group)
                if weight in own:
                    part[name] = tensor[own[weight].start : own[weight].end].to(kept_on, copy=True)
            if part:  # compared before: of a float32 model master weights and weights are one
                place = slice(own[weight].start, own[weight].end)
                compared.append((weight, made_of(weight.flatten()[place], part["param"])))
                optimizer._set_main_param_and_optimizer_states(weight, part)
            number += 1
    if hybrid:
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()
    return not_made_of(compared)
