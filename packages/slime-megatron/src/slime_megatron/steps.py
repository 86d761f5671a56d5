"""The optimizer steps of a batch, as the micro-batches of a data-parallel rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from slime_core.batch import TrainBatch
from slime_core.errors import TrainerError
from slime_models.architecture import Architecture

from slime_megatron.flops import forward_flops
from slime_megatron.micro_batch import make_micro_batch
from slime_megatron.nuclei import Nuclei
from slime_megatron.rotary import rotary_tables
from slime_megatron.routed import Routes, StepRouting
from slime_megatron.schedule import rank_schedule
from slime_megatron.section import MegatronSection
from slime_megatron.trained import Step
from slime_megatron.world import World


def pack_steps(
    batch: TrainBatch,
    architecture: Architecture,
    section: MegatronSection,
    world: World,
    *,
    max_tokens_per_gpu: int,
    needs: Collection[str],
    routes: Sequence[Routes] | None,
    nuclei: Nuclei | None,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Step]:
    """Return this rank's micro-batches of each optimizer step.

    Args:
        batch: the samples.
        architecture: of the policy; where it holds layers that predict further tokens, they are told what they see.
        section: how the model is cut.
        world: the ranks.
        max_tokens_per_gpu: tokens of a micro-batch on each rank.
        needs: what estimator and loss read.
        routes: the engine's of each sample, where they are replayed.
        nuclei: the ids that the batch's response tokens were drawn from; None where they could have been any.
        dtype: of the model.
        device: of the model.

    Raises:
        TrainerError: a sample is longer than the model's context; names it.
    """
    cut, longest = world.row_cut, _longest(batch, limit=architecture.max_position_embeddings)
    cos, sin = rotary_tables(architecture, longest + cut.most_padding, dtype=dtype)
    rotary = cos.to(device), sin.to(device)
    depths = range(1, architecture.mtp_num_layers + 1) if architecture.holds_mtp else ()
    steps: list[Step] = []
    for samples in batch.optimizer_steps:
        schedule = rank_schedule(
            batch,
            samples.tolist(),
            n_ranks=world.data_parallel_size,
            max_tokens=max_tokens_per_gpu * section.context_parallel_size,
            share=section.share_prefix and section.context_parallel_size == 1,
            cost=partial(forward_flops, architecture) if section.balance_data else None,
            routes=routes,
        )
        routing = StepRouting.of(batch, samples, routes=routes)
        further = [StepRouting.of(batch, samples, depth=depth) for depth in depths]
        steps.append(
            [
                make_micro_batch(
                    batch,
                    members.families,
                    rotary=rotary,
                    vocab_size=architecture.vocab_size,
                    cut=cut,
                    with_entropy="entropy" in needs,
                    with_sum_pi_squared="sum_pi_squared" in needs,
                    counted=members.counted,
                    routing=None if architecture.num_moe_experts is None else routing,
                    further=further,
                    nuclei=nuclei,
                )
                for members in schedule[world.data_parallel_rank]
            ]
        )
    return steps


def _longest(batch: TrainBatch, *, limit: int) -> int:
    """Return the tokens of the longest sample, which may not exceed a limit."""
    longest = int(batch.lengths.max())
    if longest > limit:
        index = int(batch.sample_ids[int(batch.lengths.argmax())])
        raise TrainerError(f"sample {index}: has {longest} tokens; the model's limit is {limit}")
    return longest
