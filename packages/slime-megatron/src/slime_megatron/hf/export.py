"""`hf_buckets`: the model's weights under their Hugging Face names, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from torch import Tensor

from slime_megatron.hf.shard import whole_tensors
from slime_megatron.model.lora import merged_weights


def stage_sender() -> int | None:
    """Return the number of this rank's pipeline stage, if it is the first of its ranks; None of the others."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    is_first = is_first and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return int(parallel_state.get_pipeline_model_parallel_rank()) if is_first else None


def hf_buckets(
    model: GPTModel,
    family: ModelFamily,
    architecture: Architecture,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    stage_alone: bool = False,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield all weights as (Hugging Face name, contiguous tensor of `dtype`), in the family's order.

    Adapters are merged, and float32 buffers (the bias of routers) stay float32. Collective over the world: every rank yields
    the same buckets, or with `stage_alone` every rank of a pipeline stage those of its weights, and holds no more than one of
    them and one tensor. A bucket holds at most `bucket_bytes`, or one tensor that is larger. Tensors that need no cast, split or
    communication are the model's own memory: read them before the model changes, and do not write to them.
    """
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    weights = family.weights(architecture)
    whole = whole_tensors(
        model, weights, architecture, merged_weights(model), dtype=dtype, stage_alone=stage_alone
    )
    for hf_name, tensor in family.hf_tensors(whole, architecture):
        n_bytes = tensor.nbytes
        if bucket and held + n_bytes > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((hf_name, tensor.contiguous()))
        held += n_bytes
    if bucket:
        yield bucket
