"""SGLang's custom weight loaders (`--custom-weight-loader`): check an update, take it in, prove what was done.

They run inside the server. SGLang ends the whole server when a loader raises, so these answer through a file. Checking is
a call of its own, because SGLang counts a version as reached when the call that names it returns. Of a server with
several tensor-parallel ranks each checks its share of the tensors, loads, and proves the parts that it holds. SGLang's own
`/update_weights_from_distributed` and `/update_weights_from_disk` write weights before anybody can check them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import EngineError
from slime_models.fingerprint import fingerprint
from slime_models.quantization.blocks import PER_WORD
from slime_models.transfer.manifest import Shape, listed
from torch import Tensor

from slime_sglang.staging import Staged

#: SGLang's modules that stack several Hugging Face matrices: leaf name -> leaf names, top to bottom.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Its parameters of all experts, [experts, rows, columns]: how the name begins -> an expert's Hugging Face matrices, top to
#: bottom. The rest of the name is that of the matrix or of its scales.
_EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
#: A packed matrix, and the two numbers that are kept beside it.
_PACKED, _SHAPE = "weight_packed", "weight_shape"

#: Which part of a tensor; all ranks' parts together are all of it.
Index = tuple[slice, ...]
WHOLE: Index = ()

CHECK, LOAD = f"{__name__}.check", f"{__name__}.load"
LOADERS = (CHECK, LOAD)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the engine tells a loader, as the name of an empty tensor."""

    folder: str
    """Where the update lies."""
    answer: str
    """File for the verdict; each rank of each of several servers has its own."""
    rank: int = 0
    """Which of the server's tensor-parallel ranks this is."""
    n_ranks: int = 1
    """How many it has."""

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rank of the server made of an update."""

    error: str | None = None
    """Why it was refused, before anything was written; None when it was not."""
    held: Mapping[str, int] | None = None
    """Fingerprints of what the server's parameters hold after loading, by Hugging Face name. Where a rank holds a part,
    that is the whole tensor's if it equals that part of it, otherwise the part's."""


def read_verdict(path: Path) -> Verdict:
    """Return what the server said since this was last asked.

    Raises:
        EngineError: it said nothing.
    """
    if not path.exists():
        raise EngineError(f"{path}: the server did not say what became of the update")
    verdict = Verdict(**json.loads(path.read_text()))
    path.unlink()
    return verdict


def check(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Answer with what is wrong with the update; writes no weight."""
    order = _order(named_tensors)
    try:
        staged = Staged(Path(order.folder))
        error = _wrong(staged, order) or _left_out(model, staged, order)
    except Exception as problem:  # which would end the server, and it is as it was
        error = f"{type(problem).__name__}: {problem}"
    _answer(order, Verdict(error=error))


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the update, and answer with fingerprints of what the model's parameters hold then.

    An error ends the server: its weights may be a mixture.
    """
    order = _order(named_tensors)
    staged = Staged(Path(order.folder))
    with torch.no_grad():
        model.load_weights(staged.tensors())
        held = {
            name: _proof(_as_sent(tensor, staged.entries[name].dtype), index, staged, name)
            for name, tensor, index in held_tensors(
                model, _shapes(staged), rank=order.rank, n_ranks=order.n_ranks
            )
            if name in staged.entries
        }
    _answer(order, Verdict(held=held))


def _proof(held: Tensor, index: Index, staged: Staged, name: str) -> int:
    """Return the fingerprint of a tensor that is held whole, or of one whose part is held and is as it should be."""
    found, entry = fingerprint(held), staged.entries[name]
    is_part = tuple(held.shape) != entry.shape
    return entry.fingerprint if is_part and found == fingerprint(staged.tensor(name)[index]) else found


def _wrong(staged: Staged, order: Order) -> str | None:
    mine = list(staged.entries)[order.rank :: order.n_ranks]
    changed = [name for name in mine if fingerprint(staged.tensor(name)) != staged.entries[name].fingerprint]
    return f"{listed(changed)}: the bytes that arrived are not those that were sent" if changed else None


def _left_out(model: Any, staged: Staged, order: Order) -> str | None:
    """Say which parameters an update leaves as they are: SGLang gives some models an output layer that theirs lacks."""
    held = held_tensors(model, _shapes(staged), rank=order.rank, n_ranks=order.n_ranks)
    left = [name for name, *_ in held if name not in staged.entries]
    return f"{listed(left)}: the server's model has it, and no tensor is for it" if left else None


def _as_sent(tensor: Tensor, dtype: str) -> Tensor:
    """Return a parameter in the dtype that was sent, where the server keeps the same numbers in float32: GLM's routers."""
    if tensor.dtype != torch.float32:
        return tensor
    cast = tensor.to(getattr(torch, dtype))
    return cast if cast.float().equal(tensor) else tensor


def _shapes(staged: Staged) -> dict[str, Shape]:
    return {name: entry.shape for name, entry in staged.entries.items()}


def _order(named_tensors: Sequence[tuple[str, Tensor]]) -> Order:
    (text, _), *_ = named_tensors
    return Order(**json.loads(text))


def _answer(order: Order, verdict: Verdict) -> None:
    Path(order.answer).write_text(json.dumps(asdict(verdict)))


def held_tensors(
    model: Any, shapes: Mapping[str, Shape], *, rank: int = 0, n_ranks: int = 1
) -> Iterator[tuple[str, Tensor, Index]]:
    """Yield what a rank holds: Hugging Face name, the parameter or a view of it, and which part of the tensor that is.

    Stacked matrices are cut at the rows that `shapes` gives; rows that pad a vocabulary are left out.
    """
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        stack, _, part_kind = kind.partition("_")
        if stack in _EXPERTS:
            names = _EXPERTS[stack]
            yield from _expert_tensors(
                module, parameter, names, part_kind, shapes, rank=rank, n_ranks=n_ranks
            )
            continue
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part}.{kind}" for part in STACKED.get(leaf, ())]
        if kind == _SHAPE:
            yield from _shapes_held(names or [name], model.get_parameter(f"{module}.{_PACKED}"), shapes)
            continue
        if not names:
            yield name, *_part(parameter, shapes.get(name), rank=rank, n_ranks=n_ranks)
            continue
        start = 0
        for part, rows, copies in _stack(names, len(parameter), shapes, n_ranks):
            view = parameter[start : start + rows]
            yield part, *_part(view, shapes.get(part), rank=rank // copies, n_ranks=n_ranks // copies)
            start += rows


def _stack(
    names: Sequence[str], total: int, shapes: Mapping[str, Shape], n_ranks: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, rows on one rank, ranks that hold the same rows) for each matrix of a stack of `total` rows."""
    whole = [shapes[name][0] if name in shapes else 0 for name in names]
    if n_ranks == 1 and total >= sum(whole):
        yield from zip(names, (rows or total for rows in whole), [1] * len(names), strict=True)
        return
    if len(set(whole)) == 1:
        yield from ((name, total // len(names), 1) for name in names)
        return
    queries, others = whole[0] // n_ranks, (total - whole[0] // n_ranks) // (len(names) - 1)
    yield names[0], queries, 1
    for name, rows in zip(names[1:], whole[1:], strict=True):
        # Where ranks are more than heads of keys and values, several hold the same.
        yield name, others, max(1, n_ranks * others // rows) if rows else 1


def _part(held: Tensor, whole: Shape | None, *, rank: int, n_ranks: int) -> tuple[Tensor, Index]:
    """Return what a rank holds of a tensor, without what pads it, and which part that is.

    It is all that is there where no part of this size would make up the tensor; that is not what was sent, then.
    """
    if whole is None or held.dim() != len(whole):
        return held, WHOLE
    cut = [axis for axis, size in enumerate(whole) if held.shape[axis] != size]
    if len(cut) != 1:
        return held, WHOLE
    (axis,) = cut
    size, share = whole[axis], held.shape[axis]
    if n_ranks * share < size:  # some is held nowhere
        return held, WHOLE
    start, end = min(rank * share, size), min((rank + 1) * share, size)
    return held.narrow(axis, 0, end - start), (*[slice(None)] * axis, slice(start, end))


def _shapes_held(
    names: Sequence[str], packed: Tensor, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Tensor, Index]]:
    """Yield the shapes of packed matrices: of those that are stacked SGLang keeps the last one's, so all are of what it holds."""
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
    """Yield each expert's matrices. They have equal shares of the rows; what pads a share is left out.

    Ranks share the rows of gate and up, and the columns of down.
    """
    share = parameter.shape[1] // len(parts)
    cut = 1 if parts == ("down_proj",) else 0
    for expert, matrix in enumerate(parameter):
        for number, part in enumerate(parts):
            name = f"{module}.{expert}.{part}.{kind}"
            size = list(shapes.get(name, (share, matrix.shape[1])))
            if name in shapes and size[cut] % n_ranks == 0:
                size[cut] //= n_ranks
            first = [0, 0]
            first[cut] = rank * size[cut]
            index = tuple(slice(start, start + n) for start, n in zip(first, size, strict=True))
            yield name, matrix[number * share : number * share + size[0], : size[1]], index
