"""The process groups of a trainer."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slime_megatron.section import MegatronSection

_TIMEOUT = datetime.timedelta(minutes=30)


def device() -> torch.device:
    """Return the device of this process: its CUDA device, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


class World:
    """Megatron's groups over the processes of the trainer: this one. Collective over the world.

    torch.distributed is initialised here unless somebody else did so before, and ended by `close` in that case only.
    """

    def __init__(self, section: MegatronSection, *, seed: int) -> None:
        self._owns = not dist.is_initialized()
        if self._owns:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=section.tensor_model_parallel_size,
            pipeline_model_parallel_size=section.pipeline_model_parallel_size,
            context_parallel_size=section.context_parallel_size,
            expert_model_parallel_size=section.expert_model_parallel_size,
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def close(self) -> None:
        """End the groups."""
        parallel_state.destroy_model_parallel()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
