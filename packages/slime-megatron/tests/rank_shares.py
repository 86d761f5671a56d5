"""Jobs of ranks, as those of `rank_jobs.py`: what each has of a row, of gradients, and of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from rank_learners import gradients_of, learner_of
from slime_core.samples import TrainBatch
from slime_megatron.checkpoint.state import _sharded
from torch import Tensor


def train_aligned(
    *, folder: Path, batch: TrainBatch, megatron: dict[str, Any], alignment: int
) -> tuple[set[int], dict[str, Tensor]]:
    """Train once with rows of a multiple of `alignment` tokens on each rank; return what is left over, and gradients."""
    rest: set[int] = set()

    def look(_layer: Any, _arguments: Any, named: dict[str, Any]) -> None:
        rest.add(len(named["hidden_states"]) % alignment)

    with learner_of(folder, megatron, {"max_tokens_per_gpu": 40}) as learner:
        learner._world.token_split = replace(learner._world.token_split, alignment=alignment)
        learner.model.decoder.layers[0].register_forward_pre_hook(look, with_kwargs=True)
        learner.train(batch)
        gradients = gradients_of(learner)
    return rest, gradients if dist.get_rank() == 0 else {}


def checkpoint_bytes(*, folder: Path, megatron: dict[str, Any]) -> tuple[int, list[int]]:
    """Return how many numbers this rank has weights of, and its bytes of the optimizer's state to be saved and to be loaded."""
    with learner_of(folder, megatron, {}) as learner:
        found = []
        for is_loading in (False, True):
            optimizer = _sharded(learner._policy_state, is_loading=is_loading)["optimizer"]
            data = [getattr(each, "data", None) for each in nested_values(optimizer)]
            found.append(sum(each.nbytes for each in data if isinstance(each, Tensor)))
        return sum(each.numel() for each in learner.model.parameters()), found


def bucket_padding(*, folder: Path, megatron: dict[str, Any]) -> list[list[int]]:
    """Return how many numbers of padding each bucket of this rank's gradients ends in, a list for each buffer."""
    with learner_of(folder, megatron, {}) as learner:
        model = learner._policy.model
        return [
            [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            for buffer in (*model.buffers, *model.expert_parallel_buffers)
        ]
