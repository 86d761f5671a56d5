"""The parameters of a server's model by Hugging Face names: SGLang stacks matrices, pads them, and shards them over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from slime_models.quantization.blocks import PER_WORD
from slime_models.tensor_spec import Shape
from torch import Tensor

#: SGLang's modules that stack several Hugging Face matrices: leaf name -> leaf names, top to bottom.
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": (
        "q_a_proj",
        "kv_a_proj_with_mqa",
    ),  # of latent attention, whole on each rank
}
#: Its parameters of all experts, [experts, rows, columns]: how the name begins -> an expert's Hugging Face matrices, top to
#: bottom. The rest of the name is that of the matrix or of its scales.
_EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
#: The output layer, and the embedding that some models have in its place.
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
#: A packed matrix, and the two numbers that are kept beside it.
_PACKED, _SHAPE = "weight_packed", "weight_shape"

#: No model has more experts in a layer.
_MOST_EXPERTS = 4096

#: What of a whole tensor, for each axis that is cut: a slice, or the numbers of rows; empty for all of it. All ranks' shards make
#: up the tensor.
Index = tuple[slice | Tensor, ...]
WHOLE: Index = ()


def held_tensors(
    model: Any,
    shapes: Mapping[str, Shape],
    *,
    rank: int = 0,
    n_ranks: int = 1,
    attention_ranks: int | None = None,
    stage: int = 0,
) -> Iterator[tuple[str, Tensor, Index]]:
    """Yield what a rank holds: Hugging Face name, the parameter or a view of it, and the slices of the whole tensor that it is.

    Stacked matrices are cut at the rows that `shapes` gives; rows that pad a vocabulary are left out. Where ranks have experts of
    their own, that is seen by how many there are.

    Args:
        model: of the rank.
        shapes: of whole tensors, by Hugging Face name.
        rank: of the server's.
        n_ranks: that share matrices.
        attention_ranks: in a row, that share attention, whose other groups of ranks hold the same (DP attention); `n_ranks` when None.
        stage: of the server's pipeline. A later one than the first has an output layer of its own where it is tied to the embedding.
    """
    attention = attention_ranks or n_ranks
    for name, parameter in model.named_parameters():
        if stage and name == _OUTPUT and name not in shapes:
            name = _EMBEDDING
        module, _, kind = name.rpartition(".")
        stack, _, part_kind = kind.partition("_")
        if stack in _EXPERTS:
            yield from _expert_tensors(
                module, parameter, _EXPERTS[stack], part_kind, shapes, rank=rank, n_ranks=n_ranks
            )
            continue
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part}.{kind}" for part in STACKED.get(leaf, ())]
        if kind == _SHAPE:
            yield from _shapes_held(names or [name], model.get_parameter(f"{module}.{_PACKED}"), shapes)
            continue
        if leaf == "gate_up_proj" and name in shapes:  # stacked in folders, too, as GLM-4's
            yield name, parameter, _gated_rows(len(parameter), shapes[name][0], rank=rank, n_ranks=n_ranks)
            continue
        if not names:
            count = _sharing(parameter, shapes.get(name), attention, n_ranks)
            yield name, *_part(parameter, shapes.get(name), rank=rank % count, n_ranks=count)
            continue
        start = 0
        count = attention if leaf == "qkv_proj" else n_ranks
        for part, rows, copies in _stack(names, len(parameter), shapes, count):
            view = parameter[start : start + rows]
            yield part, *_part(view, shapes.get(part), rank=rank % count // copies, n_ranks=count // copies)
            start += rows


def _sharing(held: Tensor, whole: Shape | None, attention: int, n_ranks: int) -> int:
    """Return how many ranks share a tensor: those of attention, where shards of this size make it up between them, or all."""
    if whole is None or held.dim() != len(whole):
        return n_ranks
    enough = all(attention * part >= size for part, size in zip(held.shape, whole, strict=True))
    return attention if enough else n_ranks


def _stack(
    names: Sequence[str], total: int, shapes: Mapping[str, Shape], n_ranks: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, rows on one rank, ranks that hold the same rows) for each matrix of a stack of `total` rows."""
    whole = [shapes[name][0] if name in shapes else 0 for name in names]
    if len(set(whole)) == 1:  # equal shares, each with what pads it
        yield from ((name, total // len(names), 1) for name in names)
        return
    if total == sum(whole) and all(whole):  # each rank has all of it
        yield from zip(names, whole, [1] * len(names), strict=True)
        return
    if n_ranks == 1 and total >= sum(whole):
        yield from zip(names, (rows or total for rows in whole), [1] * len(names), strict=True)
        return
    queries, others = whole[0] // n_ranks, (total - whole[0] // n_ranks) // (len(names) - 1)
    yield names[0], queries, 1
    for name, rows in zip(names[1:], whole[1:], strict=True):
        # With more ranks than heads of keys and values, several ranks hold the same heads.
        yield name, others, max(1, n_ranks * others // rows) if rows else 1


def _gated_rows(held: int, whole: int, *, rank: int, n_ranks: int) -> Index:
    """Return which rows a rank holds of a matrix whose upper half is the gate and whose lower half is up: its share of each.

    Where shards of this size would not make up the matrix, all of it, which cannot match what was sent.
    """
    share, half = held // 2, whole // 2
    if n_ranks == 1 or share * n_ranks != half:
        return WHOLE
    own = torch.arange(rank * share, (rank + 1) * share)
    return (torch.cat((own, half + own)),)


def _part(held: Tensor, whole: Shape | None, *, rank: int, n_ranks: int) -> tuple[Tensor, Index]:
    """Return what a rank holds of a tensor, without padding, and which slices of the tensor that is.

    Where shards of this size would not make up the tensor, all that is held is returned, which cannot match what was sent.
    """
    if whole is None or held.dim() != len(whole):
        return held, WHOLE
    cut = [axis for axis, size in enumerate(whole) if held.shape[axis] != size]
    if len(cut) != 1:
        return held, WHOLE
    (axis,) = cut
    size, share = whole[axis], held.shape[axis]
    if n_ranks * share < size:  # some rows or columns are held nowhere
        return held, WHOLE
    start, end = min(rank * share, size), min((rank + 1) * share, size)
    return held.narrow(axis, 0, end - start), (*[slice(None)] * axis, slice(start, end))


def _shapes_held(
    names: Sequence[str], packed: Tensor, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Tensor, Index]]:
    """Yield the shapes of packed matrices, computed from what is held: of stacked ones SGLang keeps only the last one's shape."""
    for name in names:
        rows, *_ = shapes.get(name.removesuffix(_SHAPE) + _PACKED, packed.shape)
        yield name, torch.tensor((rows, packed.shape[1] * PER_WORD)), WHOLE


def _expert_tensors(
    module: str,
    parameter: Tensor,
    parts: Sequence[str],
    kind: str,
    shapes: Mapping[str, Shape],
    *,
    rank: int,
    n_ranks: int,
) -> Iterator[tuple[str, Tensor, Index]]:
    """Yield each expert's matrices, which have equal shares of the rows; padding is left out.

    Ranks shard the rows of gate and up, and the columns of down. Where a rank has fewer experts than the model, they are divided
    among groups of ranks in a row, of which each shards its own.
    """
    share = parameter.shape[1] // len(parts)
    total = sum(f"{module}.{expert}.{parts[0]}.{kind}" in shapes for expert in range(_MOST_EXPERTS))
    groups = max(1, total // len(parameter))
    n_ranks = max(1, n_ranks // groups)
    first_expert, rank = rank // n_ranks * len(parameter) if groups > 1 else 0, rank % n_ranks
    cut = 1 if parts == ("down_proj",) else 0
    for expert, matrix in enumerate(parameter, start=first_expert):
        for number, part in enumerate(parts):
            name = f"{module}.{expert}.{part}.{kind}"
            size = list(shapes.get(name, (share, matrix.shape[1])))
            if name in shapes and size[cut] % n_ranks == 0:
                size[cut] //= n_ranks
            first = [0, 0]
            first[cut] = rank * size[cut]
            index = tuple(slice(start, start + n) for start, n in zip(first, size, strict=True))
            yield name, matrix[number * share : number * share + size[0], : size[1]], index
