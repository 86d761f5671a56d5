"""LoRA: low-rank adapters beside Megatron's linear layers, sharded like the layers, which are frozen.

Of a column-parallel layer (rows of W are sharded) every tensor-parallel rank holds all of A and its rows of B; of a
row-parallel layer (columns of W are sharded) its columns of A and all of B. Ranks exchange `rank` numbers a token. Of a layer
that every rank has whole, it has all of both.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from slime_core.errors import TrainerError
from slime_models.cpu import product
from slime_models.family.architecture import Architecture
from slime_models.family.family import ModelFamily
from slime_models.family.rules import Shard
from slime_models.family.weights import Weight
from torch import Tensor
from torch.nn import Module, Parameter

from slime_megatron.model.layers.replicated_linear import ReplicatedLinear
from slime_megatron.model.lora_math import A, B, merge
from slime_megatron.settings.section_roles import LINEAR_LAYERS, LoraSection


def add_adapters(model: Module, names: Mapping[str, Tensor], section: LoraSection, *, seed: int) -> None:
    """Give every target layer y = W x + (alpha / rank) B A x, and freeze all but A [rank, in] and B [out, rank].

    B begins at zero, so that the model begins as it was; A is drawn uniformly within ±1/sqrt(in), by the layer's
    name and `seed`. Source: arXiv 2106.09685, section 4.1; the draw is that of Microsoft's and PEFT's code.

    Args:
        model: this rank's part.
        names: its weights by their names in the whole model.
        section: rank, scale, and target layers.
        seed: of the draw.

    Raises:
        TrainerError: no layer has the name of a target, or tensor parallelism shards a target within experts.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    name_of = {id(parameter): name.removesuffix(".weight") for name, parameter in names.items()}
    found: set[str] = set()
    for module, layer in list(model.named_modules()):
        target = module.rpartition(".")[2]
        if target in LINEAR_LAYERS:
            found.add(target)
        if section.targets(target):
            _add(layer, section, seed=zlib.crc32(name_of[id(layer.weight)].encode()) ^ seed)
    if lacking := set(section.target_modules or ()) - found:
        raise TrainerError(
            f"lora.target_modules: the model has no layer named {', '.join(sorted(lacking))}; "
            f"it has {', '.join(name for name in LINEAR_LAYERS if name in found)}"
        )


def _add(layer: Any, section: LoraSection, *, seed: int) -> None:
    assert section.rank is not None
    ranks: dist.ProcessGroup = layer.tp_group
    if layer.is_expert and ranks.size() > 1:
        raise TrainerError(
            f"lora.rank: tensor parallelism cuts experts into {ranks.size()} parts, and adapters within experts cannot be "
            "cut; set expert_tensor_parallel_size to 1, or leave linear_fc1 and linear_fc2 out of lora.target_modules"
        )
    is_cut = ranks.size() > 1 and not isinstance(layer, ReplicatedLinear)
    by_rows = isinstance(layer, ColumnParallelLinear)
    rows, columns = layer.weight.shape
    whole_columns = columns * ranks.size() if is_cut and not by_rows else columns
    bound = 1 / math.sqrt(whole_columns)
    drawn = torch.empty(section.rank, whole_columns)
    drawn.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    own = drawn.chunk(ranks.size(), dim=1)[ranks.rank()] if is_cut and not by_rows else drawn
    layer.register_parameter(A, Parameter(own.to(layer.weight)))
    layer.register_parameter(B, Parameter(layer.weight.new_zeros(rows, section.rank)))
    layer.lora_scale = section.alpha / section.rank
    for parameter in (layer.lora_a, layer.lora_b):
        parameter.allreduce = getattr(
            layer.weight, "allreduce", True
        )  # among which ranks its gradient adds up
    if isinstance(layer, ReplicatedLinear):
        for parameter in (layer.lora_a, layer.lora_b):
            parameter.sequence_parallel = layer.sequence_parallel  # type: ignore[union-attr]  # Megatron's mark
    elif is_cut:
        cut, whole = (layer.lora_b, layer.lora_a) if by_rows else (layer.lora_a, layer.lora_b)
        tensor_parallel.set_tensor_model_parallel_attributes(cut, True, 0 if by_rows else 1, 1)
        whole.sequence_parallel = (
            layer.sequence_parallel
        )  # each rank has the gradient of its tokens, to be added up

    def adapt(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        y, bias = output
        hidden = _communicated(layer, product(inputs[0], layer.lora_a.t()))
        return y + layer.lora_scale * product(hidden, layer.lora_b.t()), bias

    layer.register_forward_hook(adapt)


def _communicated(layer: Any, hidden: Tensor) -> Tensor:
    """Return A x, [.., rank], as this rank's B needs it. Collective over the layer's tensor-parallel ranks.

    The backward pass adds up the gradients of A x that the B of each rank gives.
    """
    ranks: dist.ProcessGroup = layer.tp_group
    if ranks.size() == 1 or isinstance(layer, ReplicatedLinear):
        return hidden
    if isinstance(layer, ColumnParallelLinear):
        if layer.sequence_parallel:
            communicate = tensor_parallel.gather_from_sequence_parallel_region
        else:
            communicate = tensor_parallel.copy_to_tensor_model_parallel_region
    elif layer.sequence_parallel:
        communicate = tensor_parallel.reduce_scatter_to_sequence_parallel_region
    else:
        communicate = tensor_parallel.reduce_from_tensor_model_parallel_region
    communicated: Tensor = communicate(hidden, group=ranks)
    return communicated


def shard_adapters(state: ShardedStateDict, model: Module, data_parallel: dist.ProcessGroup) -> None:
    """Mark the sharded adapters in a model's `sharded_state_dict`: Megatron's layers know of their own weights only.

    Args:
        state: changed in place.
        model: this rank's part.
        data_parallel: the group of ranks that hold replicas.
    """
    for module, layer in model.named_modules():
        for own in (A, B):
            parameter = getattr(layer, own, None)
            if parameter is None or not getattr(parameter, "tensor_model_parallel", False):
                continue
            name = f"{module}.{own}"
            found = state[name]
            outer = tuple(
                (axis, found.global_offset[axis], found.axis_fragmentations[axis])
                for axis in range(found.prepend_axis_num)
            )
            groups = {"tp_group": layer.tp_group, "dp_cp_group": data_parallel}
            cut = make_tp_sharded_tensor_for_checkpoint(
                parameter, found.key, parameter.partition_dim, prepend_offsets=outer, **groups
            )
            if module.endswith(".linear_fc1"):  # gate and up are cut each
                cut = apply_swiglu_sharded_factory(
                    cut, outer, False, tp_group=layer.tp_group, dp_group=data_parallel
                )
            state[name] = cut


def adapter_weights(
    family: ModelFamily, architecture: Architecture, section: LoraSection
) -> dict[str, Weight]:
    """Return Megatron name -> `Weight`, for each adapter matrix of the whole model."""
    found = {}
    for name, weight in family.weights(architecture).items():
        layer = name.removesuffix(".weight")
        if layer == name or not section.targets(layer.rpartition(".")[2]):
            continue
        assert section.rank is not None
        by_rows = weight.rule.shard is not Shard.COLUMNS
        for own, shape, is_cut in (
            (A, (section.rank, weight.shape[1]), not by_rows),
            (B, (weight.shape[0], section.rank), by_rows),
        ):
            rule = weight.rule if is_cut else dataclasses.replace(weight.rule, shard=Shard.NONE)
            found[f"{layer}.{own}"] = dataclasses.replace(weight, shape=shape, rule=rule)
    return found


def clear_adapters(model: Module) -> None:
    """Set every B to zero: the model is the base again."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(f".{B}"):
                parameter.zero_()


def merged_weights(model: Module) -> Callable[[Tensor], Tensor]:
    """Return a function from a parameter to its values, its adapter merged in if it is a layer's that has one.

    W + (alpha / rank) B A is computed in float32 and rounded once. Other values are the model's own.
    """
    layers: dict[int, Any] = {id(layer.weight): layer for layer in model.modules() if hasattr(layer, A)}

    def merged(parameter: Tensor) -> Tensor:
        layer = layers.get(id(parameter))
        if layer is None:
            return parameter.detach()
        return merge(parameter.detach(), layer.lora_a.detach(), layer.lora_b.detach(), layer.lora_scale)

    return merged
