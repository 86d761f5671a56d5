"""`World`: the process groups of a trainer, and what ranks tell each other about a step."""

from __future__ import annotations

import datetime
import math
import socket
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from slime_core.config.build import Rank
from slime_core.errors import TrainerError
from torch import Tensor

from slime_megatron.parallel.token_split import TokenSplit
from slime_megatron.settings.parallel_checks import check_processes
from slime_megatron.settings.section import MegatronSection

_TIMEOUT = datetime.timedelta(minutes=30)


def device() -> torch.device:
    """Return the device of this process: its CUDA device, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def token_alignment(section: MegatronSection) -> int:
    """Return of what the number of tokens of a rank must be a multiple: of 1, but for products of float8 or float4."""
    flags = section.megatron_args
    if "fp4_format" in flags:
        return int(get_fp4_align_size(flags.get("fp4_recipe", Fp4Recipe.nvfp4)))
    if "fp8_format" in flags:
        return int(get_fp8_align_size(flags.get("fp8_recipe", Fp8Recipe.delayed)))
    return 1


def _check_gpu(rank: Rank) -> None:
    """Refuse to compute on the CPU in the place of a GPU."""
    if rank.gpu is not None and not torch.cuda.is_available():
        raise TrainerError(
            f"rank {rank.number} of {rank.count}: found no CUDA device on {socket.gethostname()}, where it was given GPU "
            f"{rank.gpu}; wanted a driver and a torch that see it; --ray-device cpu trains without"
        )


def _meet(rank: Rank) -> None:
    """Initialise torch.distributed, without a server where there is one process."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if rank.count == 1:
        store: dist.Store = dist.HashStore()
    else:
        first = rank.number == 0
        store = dist.TCPStore(rank.address, rank.port, rank.count, is_master=first, timeout=_TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank.number, world_size=rank.count, timeout=_TIMEOUT)


class World:
    """Megatron's groups over the processes of the trainer. Collective over the world.

    Where torch.distributed is initialised already, its processes are the world; else those that `rank` counts, which
    connect here, and `close` ends it.

    Raises:
        TrainerError: the sizes of `section` do not divide the number of processes; or this one was given a GPU that CUDA
            does not find.
    """

    def __init__(self, section: MegatronSection, *, seed: int, rank: Rank | None = None) -> None:
        rank = rank or Rank()
        _check_gpu(rank)
        check_processes(section, dist.get_world_size() if dist.is_initialized() else rank.count)
        self._owns = not dist.is_initialized()
        if self._owns:
            _meet(rank)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=section.tensor_model_parallel_size,
            pipeline_model_parallel_size=section.pipeline_model_parallel_size,
            context_parallel_size=section.context_parallel_size,
            expert_model_parallel_size=section.expert_model_parallel_size,
            expert_tensor_parallel_size=section.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.size = dist.get_world_size()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        #: How the ranks of one model replica share the tokens of a micro-batch.
        self.token_split = TokenSplit(
            context=parallel_state.get_context_parallel_group()
            if section.context_parallel_size > 1
            else None,
            parts=section.tensor_model_parallel_size if section.sequence_parallel else 1,
            part=parallel_state.get_tensor_model_parallel_rank() if section.sequence_parallel else 0,
            alignment=token_alignment(section),
        )
        #: Whether this rank reports for its data-parallel replica: other ranks of it compute the same.
        self._reports = (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def gather_columns(self, values: Tensor) -> Tensor:
        """Return the values that the data-parallel ranks of the last pipeline stage computed, on every rank.

        Collective over the world.

        Args:
            values: float32, of one shape on all ranks; NaN where this rank computed nothing. A value that several ranks
                computed is the same on each.
        """
        if self.size == 1:
            return values
        known = values.isfinite() if self._reports else torch.zeros_like(values, dtype=torch.bool)
        both = torch.stack([values.where(known, 0.0), known.to(values.dtype)])
        dist.all_reduce(both)
        return both[0] / both[1]  # 0 / 0 is NaN: no rank computed it

    def sum_over_ranks(self, values: Mapping[str, float]) -> Counter[str]:
        """Return the sums over data-parallel ranks of the last stage's values, on every rank. Collective over the world."""
        if self.size == 1:
            return Counter(values)
        found: list[Mapping[str, float]] = [{} for _ in range(self.size)]
        dist.all_gather_object(found, dict(values) if self._reports else {})
        names = dict.fromkeys(name for each in found for name in each)
        return Counter({name: math.fsum(each.get(name, 0.0) for each in found) for name in names})

    def all_ranks(self, fact: bool) -> bool:
        """Return whether a fact holds on every rank. Collective over the world."""
        if self.size == 1:
            return fact
        missing = torch.tensor(float(not fact), device=device())
        dist.all_reduce(missing)
        return float(missing) == 0.0

    def close(self) -> None:
        """Destroy the process groups."""
        parallel_state.destroy_model_parallel()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
