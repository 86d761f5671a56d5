"""SGLang's custom weight loaders (`--custom-weight-loader`): check an update, take it in, prove what was done.

They run inside the server. SGLang ends the whole server when a loader raises, so these answer through a file. Checking is
a call of its own, because SGLang counts a version as reached when the call that names it returns. SGLang's own
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
from slime_models.transfer.manifest import listed
from torch import Tensor

from slime_sglang.staging import Staged

#: SGLang's modules that stack several Hugging Face matrices: leaf name -> leaf names, top to bottom.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Its parameters of all experts, [experts, rows, columns]: how the name begins -> an expert's Hugging Face matrices, top to
#: bottom. The rest of the name is that of the matrix or of its scales.
_EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
#: A packed matrix, and the two numbers that are kept beside it.
_PACKED, _SHAPE = "weight_packed", "weight_shape"

CHECK, LOAD = f"{__name__}.check", f"{__name__}.load"
LOADERS = (CHECK, LOAD)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the engine tells a loader, as the name of an empty tensor."""

    folder: str
    """Where the update lies."""
    answer: str
    """File for the verdict; each of several servers has its own."""

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the server made of an update."""

    error: str | None = None
    """Why it was refused, before anything was written; None when it was not."""
    held: Mapping[str, int] | None = None
    """Fingerprints of what the server's parameters hold after loading, by Hugging Face name."""


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
        error = _wrong(staged) or _left_out(model, staged)
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
        shapes = {name: entry.shape for name, entry in staged.entries.items()}
        held = {
            name: fingerprint(_as_sent(tensor, staged.entries[name].dtype))
            for name, tensor in held_tensors(model, shapes)
            if name in shapes
        }
    _answer(order, Verdict(held=held))


def _wrong(staged: Staged) -> str | None:
    changed = [
        name for name, tensor in staged.tensors() if fingerprint(tensor) != staged.entries[name].fingerprint
    ]
    return f"{listed(changed)}: the bytes that arrived are not those that were sent" if changed else None


def _left_out(model: Any, staged: Staged) -> str | None:
    """Say which parameters an update leaves as they are: SGLang gives some models an output layer that theirs lacks."""
    shapes = {name: entry.shape for name, entry in staged.entries.items()}
    left = [name for name, _ in held_tensors(model, shapes) if name not in shapes]
    return f"{listed(left)}: the server's model has it, and no tensor is for it" if left else None


def _as_sent(tensor: Tensor, dtype: str) -> Tensor:
    """Return a parameter in the dtype that was sent, where the server keeps the same numbers in float32: GLM's routers."""
    if tensor.dtype != torch.float32:
        return tensor
    cast = tensor.to(getattr(torch, dtype))
    return cast if cast.float().equal(tensor) else tensor


def _order(named_tensors: Sequence[tuple[str, Tensor]]) -> Order:
    (text, _), *_ = named_tensors
    return Order(**json.loads(text))


def _answer(order: Order, verdict: Verdict) -> None:
    Path(order.answer).write_text(json.dumps(asdict(verdict)))


def held_tensors(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters under their Hugging Face names, as views.

    Stacked matrices are cut at the rows that `shapes` gives; rows that pad a vocabulary are left out.
    """
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        stack, _, part_kind = kind.partition("_")
        if stack in _EXPERTS:
            yield from _expert_tensors(module, parameter, _EXPERTS[stack], part_kind, shapes)
            continue
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part}.{kind}" for part in STACKED.get(leaf, ())] or [name]
        if kind == _SHAPE:
            yield from _shapes_held(names, model.get_parameter(f"{module}.{_PACKED}"), shapes)
            continue
        start = 0
        for part in names:
            rows = shapes[part][0] if part in shapes else len(parameter)
            yield part, parameter[start : start + rows]
            start += rows


def _shapes_held(
    names: Sequence[str], packed: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the shapes of packed matrices: of those that are stacked SGLang keeps the last one's, so all are of what it holds."""
    for name in names:
        rows, *_ = shapes.get(name.removesuffix(_SHAPE) + _PACKED, packed.shape)
        yield name, torch.tensor((rows, packed.shape[1] * PER_WORD))


def _expert_tensors(
    module: str, parameter: Tensor, parts: Sequence[str], kind: str, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each expert's matrices. They have equal shares of the rows; what pads a share is left out."""
    share = parameter.shape[1] // len(parts)
    for expert, matrix in enumerate(parameter):
        for number, part in enumerate(parts):
            name = f"{module}.{expert}.{part}.{kind}"
            rows, columns = shapes.get(name, (share, matrix.shape[1]))
            yield name, matrix[number * share : number * share + rows, :columns]
