"""Shards of weights: this rank's under the names of the whole model, and whole tensors gathered from all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from slime_models.family.architecture import Architecture
from slime_models.family.sharding import join, split
from slime_models.family.weights import Weight
from torch import Tensor

from slime_megatron.model.parameters import MTP, named_weights

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_ANY_LAYER = re.compile(r"^(decoder|mtp)\.layers\.\d+\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def global_weights(model: GPTModel, architecture: Architecture) -> dict[str, Tensor]:
    """Return the weights of this rank (see `named_weights`) by their names in the whole model.

    Megatron numbers layers from 0 on each pipeline stage, and experts on each expert-parallel rank. A last stage
    with a copy of the embedding as its output layer has it under the embedding's name. MTP layers are left
    out unless the architecture holds them.
    """
    first_expert = 0
    if architecture.num_moe_experts is not None:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first_expert = architecture.num_moe_experts // ranks * parallel_state.get_expert_model_parallel_rank()

    def layer(found: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(found[1])].layer_number - 1}."

    def expert(found: re.Match[str]) -> str:
        return f".local_experts.{int(found[1]) + first_expert}."

    return {
        _EMBEDDING
        if name == _OUTPUT and architecture.tie_word_embeddings
        else _EXPERT.sub(expert, _LAYER.sub(layer, name)): tensor
        for name, tensor in named_weights(model).items()
        if architecture.holds_mtp or not name.startswith(MTP)
    }


def own_part(tensor: Tensor, weight: Weight, architecture: Architecture) -> Tensor:
    """Return this tensor-parallel rank's shard of a whole tensor."""
    group = _tensor_group(weight)
    return split(tensor, weight.rule.shard, group.size(), architecture)[group.rank()]


def whole_tensors(
    model: GPTModel,
    weights: Mapping[str, Weight],
    architecture: Architecture,
    read: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    stage_alone: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron name, whole tensor) of tensors of the model, on every rank. Collective over the world.

    Args:
        model: this rank's part.
        weights: which tensors, and how they are sharded.
        architecture: of the model.
        read: returns what is wanted of a weight, a tensor of its shape.
        dtype: to which tensors are cast before they are communicated, except float32 buffers.
        stage_alone: yield those of this rank's pipeline stage, of which no other stage hears. All stages together yield each once.
    """
    own = global_weights(model, architecture)
    stage_of = _stages(own)
    stages = parallel_state.get_pipeline_model_parallel_group()
    for name, weight in weights.items():
        kept = torch.float32 if weight.rule.buffer else dtype
        owner = stage_of[_unit(name)]
        if stage_alone and owner != stages.rank():
            continue
        tensor = None if name not in own else read(own[name]).to(kept)
        if owner == stages.rank():
            tensor = _whole_on_stage(tensor, weight, architecture, model, dtype=kept)
        if stage_alone:
            assert tensor is not None
            yield name, tensor
            continue
        yield name, _broadcast(tensor, weight.shape, owner, stages, like=model, dtype=kept)


def _whole_on_stage(
    part: Tensor | None, weight: Weight, architecture: Architecture, model: GPTModel, *, dtype: torch.dtype
) -> Tensor:
    """Return the whole tensor on every rank of its stage."""
    whole = None
    if part is not None:
        group = _tensor_group(weight)
        parts = [part]
        if group.size() > 1 and part.shape != weight.shape:
            parts = [torch.empty_like(part) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
        whole = join(parts, weight.rule.shard)
    if weight.expert is None:
        assert whole is not None
        return whole
    ranks = parallel_state.get_expert_model_parallel_group()
    assert architecture.num_moe_experts is not None
    owner = weight.expert // (architecture.num_moe_experts // ranks.size())
    return _broadcast(whole, weight.shape, owner, ranks, like=model, dtype=dtype)


def _broadcast(
    tensor: Tensor | None,
    shape: tuple[int, ...],
    owner: int,
    group: dist.ProcessGroup,
    *,
    like: GPTModel,
    dtype: torch.dtype,
) -> Tensor:
    """Return the owner's tensor on every rank of the group."""
    if group.size() == 1:
        assert tensor is not None
        return tensor
    if tensor is None or group.rank() != owner:
        tensor = torch.empty(shape, dtype=dtype, device=next(like.parameters()).device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
    return tensor


def _tensor_group(weight: Weight) -> dist.ProcessGroup:
    """Return the tensor-parallel group that shards a weight: another one for experts."""
    group: dist.ProcessGroup = (
        parallel_state.get_tensor_model_parallel_group()
        if weight.expert is None
        else parallel_state.get_expert_tensor_parallel_group()
    )
    return group


def _stages(own: Mapping[str, Tensor]) -> dict[str, int]:
    """Return unit (see `_unit`) -> first pipeline stage that holds it. Collective over the pipeline group."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    mine = {_unit(name) for name in own}
    found = [mine] * stages.size()
    if stages.size() > 1:
        dist.all_gather_object(found, mine, group=stages)
    return {unit: stage for stage, units in reversed(list(enumerate(found))) for unit in units}


def _unit(name: str) -> str:
    """Return the unit that a stage holds whole or not at all: the layer of a tensor, or a tensor outside of layers."""
    found = _ANY_LAYER.match(name)
    return name if found is None else found[0]
