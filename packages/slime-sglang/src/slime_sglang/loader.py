"""SGLang's custom weight loaders (`--custom-weight-loader`): check an update, take it in, prove what was done.

They run inside the server. SGLang ends the whole server when a loader raises, so these answer through a file. Checking is
a call of its own, because SGLang counts a version as reached when the call that names it returns. Of a server with
several tensor-parallel ranks each checks its share of the tensors, loads, and proves the parts that it holds. SGLang's own
`/update_weights_from_distributed` and `/update_weights_from_disk` write weights before anybody can check them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import EngineError, WeightSyncError
from slime_models.fingerprint import fingerprint
from slime_models.transfer.manifest import Shape, listed
from torch import Tensor

from slime_sglang.held import Index, held_tensors
from slime_sglang.staging import Staged

CHECK, LOAD = f"{__name__}.check", f"{__name__}.load"
LOADERS = (CHECK, LOAD)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the engine tells a loader, as the name of an empty tensor."""

    folder: str
    """Where the update lies."""
    answer: str
    """File for the verdict, not there yet."""
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
    """Return what the server said, and remove it.

    Raises:
        EngineError: it said nothing, or where this host does not see it.
    """
    if not path.exists():
        raise EngineError(
            f"{path}: the server did not say there what became of the update; one on another host must see the run's "
            "folder under the same name"
        )
    verdict = Verdict(**json.loads(path.read_text()))
    path.unlink()
    return verdict


def check(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Answer with what is wrong with the update; writes no weight."""
    order = _order(named_tensors)
    try:
        if not Path(order.folder).is_dir():
            raise WeightSyncError(
                f"{order.folder}: the server's host does not see this folder; one that is not the run's host needs "
                "--update-weight-transport disk and an --output-dir that both see under one name"
            )
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
