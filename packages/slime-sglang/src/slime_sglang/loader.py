"""SGLang's custom weight loaders (`--custom-weight-loader`): fetch an update, check it, take it in, prove what was done.

They run inside the server. SGLang ends the whole server when a loader raises, so these answer through a file. Checking is
a call of its own, because SGLang counts a version as reached when the call that names it returns. SGLang's own
`/update_weights_from_distributed` and `/update_weights_from_disk` write weights before anybody can check them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import EngineError
from slime_models.fingerprint import fingerprint
from slime_models.transfer.broadcast import receive_broadcast
from slime_models.transfer.channels import BroadcastChannel
from slime_models.transfer.manifest import listed
from torch import Tensor

from slime_sglang.staging import WEIGHTS, Staged

#: SGLang's modules that stack several Hugging Face matrices: leaf name -> leaf names, top to bottom.
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


FETCH, CHECK, LOAD = f"{__name__}.fetch", f"{__name__}.check", f"{__name__}.load"
LOADERS = (FETCH, CHECK, LOAD)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the engine tells a loader, as the name of an empty tensor."""

    folder: str = ""
    """Where the update lies, or is to be put."""
    answer: str = ""
    """File for the verdict."""
    channel: Mapping[str, Any] | None = None
    """`BroadcastChannel` to fetch from."""
    capacity: int = 0
    """Bytes that a fetched update may take."""

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


def fetch(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Receive an update of the transport `distributed` into the folder; writes no weight."""

    def work(order: Order) -> None:
        assert order.channel is not None, "an order to fetch names its channel"
        folder = Path(order.folder)
        manifest = receive_broadcast(
            BroadcastChannel(**order.channel), 1, folder / WEIGHTS, capacity=order.capacity
        )
        manifest.write(folder)

    _answering(named_tensors, work)


def check(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Check the bytes of the update in the folder; writes no weight."""

    def work(order: Order) -> str | None:
        staged = Staged(Path(order.folder))
        changed = [
            name
            for name, tensor in staged.tensors()
            if fingerprint(tensor) != staged.entries[name].fingerprint
        ]
        return f"{listed(changed)}: the bytes that arrived are not those that were sent" if changed else None

    _answering(named_tensors, work)


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the update, and answer with fingerprints of what the model's parameters hold then.

    An error ends the server: its weights may be a mixture.
    """
    order = _order(named_tensors)
    staged = Staged(Path(order.folder))
    with torch.no_grad():
        model.load_weights(staged.tensors())
        shapes = {name: entry.shape for name, entry in staged.entries.items()}
        held = {name: fingerprint(tensor) for name, tensor in held_tensors(model, shapes) if name in shapes}
    _answer(order, Verdict(held=held))


def _answering(named_tensors: Sequence[tuple[str, Tensor]], work: Callable[[Order], str | None]) -> None:
    """Answer with what `work` finds wrong, or with how it fails: the server is as it was."""
    order = _order(named_tensors)
    try:
        error = work(order)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    _answer(order, Verdict(error=error))


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
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part}.{kind}" for part in _STACKED.get(leaf, ())] or [name]
        start = 0
        for part in names:
            rows = shapes[part][0] if part in shapes else len(parameter)
            yield part, parameter[start : start + rows]
            start += rows
