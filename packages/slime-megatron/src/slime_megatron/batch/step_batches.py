"""`pack_steps`: the micro-batches of this data-parallel rank, for each optimizer step of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.errors import TrainerError
from slime_core.samples import TrainBatch
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_megatron.batch.micro_batch import BatchOnDevice, MicroBatches, make_micro_batch
from slime_megatron.batch.rank_schedule import rank_schedule
from slime_megatron.batch.rope import rotary_tables
from slime_megatron.batch.routing import StepRouting
from slime_megatron.batch.sampling_mask import SamplingMask
from slime_megatron.batch.trees.flops import forward_flops
from slime_megatron.batch.trees.sharing import Routes
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.parallel.process_groups import World
from slime_megatron.settings.section import MegatronSection


def pack_steps(
    batch: TrainBatch,
    architecture: Architecture,
    section: MegatronSection,
    world: World,
    *,
    max_tokens_per_gpu: int,
    needs: Collection[str],
    routes: Sequence[Routes] | None,
    sampling_mask: SamplingMask | None,
    dtype: torch.dtype,
    device: torch.device,
    rotary: Callable[..., tuple[Tensor, Tensor]] = rotary_tables,
    flops: Callable[[Architecture, TokenTree], int] = forward_flops,
) -> list[MicroBatches]:
    """Return this rank's micro-batches of each optimizer step.

    Args:
        batch: the samples.
        architecture: of the policy; with MTP layers that are trained, micro-batches have their rows, too.
        section: how the model is parallelised.
        world: the ranks.
        max_tokens_per_gpu: tokens of a micro-batch on each rank.
        needs: what estimator and loss read.
        routes: the engine's experts for each sample, where they are replayed.
        sampling_mask: the ids that top-p and top-k left for each of the batch's response tokens; None without either.
        dtype: of the model.
        device: of the model.
        rotary: makes the rotary tables.
        flops: counts the FLOPs of a tree of samples, which ranks share out.

    Raises:
        TrainerError: a sample is longer than the model's context; names it.
    """
    split, longest = world.token_split, _longest(batch, limit=architecture.max_position_embeddings)
    cos, sin = rotary(architecture, longest + split.max_padding, dtype=dtype)
    source = BatchOnDevice(
        batch=batch,
        rotary=(cos.to(device), sin.to(device)),
        vocab_size=architecture.vocab_size,
        split=split,
        needs=needs,
        sampling_mask=sampling_mask,
        flops=partial(flops, architecture),
    )
    pack = partial(
        _pack_step,
        source,
        architecture=architecture,
        section=section,
        world=world,
        max_tokens=max_tokens_per_gpu * section.context_parallel_size,
        routes=routes,
        cost=source.flops if section.balance_data else None,
    )
    return [pack(samples) for samples in batch.optimizer_steps]


def _pack_step(
    source: BatchOnDevice,
    samples: NDArray[np.int64],
    *,
    architecture: Architecture,
    section: MegatronSection,
    world: World,
    max_tokens: int,
    routes: Sequence[Routes] | None,
    cost: Callable[[TokenTree], int] | None,
) -> MicroBatches:
    """Return this rank's micro-batches of one optimizer step, of the samples at some positions in the batch."""
    batch = source.batch
    schedule = rank_schedule(
        batch,
        samples.tolist(),
        n_ranks=world.data_parallel_size,
        max_tokens=max_tokens,
        share=section.share_prefix and section.context_parallel_size == 1,
        cost=cost,
        routes=routes,
    )
    routing = StepRouting.of(batch, samples, routes=routes)
    depths = range(1, architecture.mtp_num_layers + 1) if architecture.holds_mtp else ()
    mtp_routing = [StepRouting.of(batch, samples, depth=depth) for depth in depths]
    return [
        make_micro_batch(
            source,
            plan.trees,
            counted=plan.counted,
            routing=None if architecture.num_moe_experts is None else routing,
            mtp_routing=mtp_routing,
        )
        for plan in schedule[world.data_parallel_rank]
    ]


def _longest(batch: TrainBatch, *, limit: int) -> int:
    """Return the tokens of the longest sample, which may not exceed a limit."""
    longest = int(batch.lengths.max())
    if longest > limit:
        index = int(batch.sample_ids[int(batch.lengths.argmax())])
        raise TrainerError(f"sample {index}: has {longest} tokens; the model's limit is {limit}")
    return longest
