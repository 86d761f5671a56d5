"""SGLang's custom weight loaders (`--custom-weight-loader`): check a staged update, load it, and fingerprint the result.

They run inside the server. SGLang ends the whole server when a loader raises, so they write their result to a file. Checking
is a call of its own, because SGLang reports a version as soon as the call that names it returns. Of a server with several
ranks each checks its share of the tensors, loads, and fingerprints the parts that it holds. SGLang's own
`/update_weights_from_distributed` and `/update_weights_from_disk` write weights before anybody can check them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_models.transfer.fingerprint import fingerprints_of
from slime_models.transfer.manifest import Entry, listed
from slime_models.transfer.staging import StagedTensors
from torch import Tensor

from slime_sglang.inside.held_weights import HeldWeights
from slime_sglang.weights.protocol import LoaderRequest, LoaderResult

#: Attributes of a model: the update that was checked, until it is loaded; and the one that was loaded last.
_CHECKED, _LOADED = "slime_checked_update", "slime_loaded_update"


def check(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Report what is wrong with the update; writes no weight."""
    request = read_request(named_tensors)
    try:
        if not Path(request.folder).is_dir():
            raise WeightSyncError(
                f"{request.folder}: the server's host does not see this folder; one that is not the run's host needs "
                "--update-weight-transport disk and an --output-dir that both see under one name"
            )
        staged = StagedTensors(Path(request.folder), before=model.__dict__.pop(_LOADED, None))
        error = _damaged(staged, request) or _missing(model, staged, request)
        if error is None:
            setattr(model, _CHECKED, staged)  # its memory stays mapped until it is loaded
    except Exception as problem:  # raising would end the server, which still has its old weights
        error = f"{type(problem).__name__}: {problem}"
    answer(request, LoaderResult(error=error))


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the update, and report fingerprints of what the model's parameters then hold.

    An error ends the server: its weights may be a mixture of old and new.
    """
    request = read_request(named_tensors)
    staged: StagedTensors = model.__dict__.pop(_CHECKED)
    assert staged.folder == Path(request.folder), "an update is checked, then loaded"
    weights = _held_weights(model, staged, request)
    weights.load(staged.tensors())
    held = fingerprints_held(weights.places, staged.entries, staged.tensor)
    if not unequal(held, staged.entries):
        weights.end()
    if request.keeps and staged.is_mapped:
        setattr(model, _LOADED, staged)
    answer(request, LoaderResult(held=held))


def fingerprints_held(
    held: Mapping[str, Sequence[Any]], entries: Mapping[str, Entry], sent: Callable[[str], Tensor]
) -> dict[str, int]:
    """Return the fingerprints of what a rank holds of an update: the whole tensor's where it holds an equal part of one.

    Args:
        held: name -> (parameter or a view of it, which slices of the whole tensor it is); see `HeldWeights.places`.
        entries: of the update, by name.
        sent: returns a whole tensor of the update.
    """
    found = fingerprints_of(
        (name, as_sent(tensor, entries[name].dtype)) for name, (tensor, _) in held.items()
    )
    parts = fingerprints_of(
        (name, sent(name)[index])
        for name, (tensor, index) in held.items()
        if tuple(tensor.shape) != entries[name].shape
    )
    equal = {name: entries[name].fingerprint for name, part in parts.items() if found[name] == part}
    return found | equal


def unequal(found: Mapping[str, int], entries: Mapping[str, Entry]) -> list[str]:
    """Return the names of tensors whose fingerprints are not those that were sent."""
    return [name for name, each in found.items() if each != entries[name].fingerprint]


def _damaged(staged: StagedTensors, request: LoaderRequest) -> str | None:
    number, count = request.stage * request.n_ranks + request.rank, request.n_stages * request.n_ranks
    mine = list(staged.entries)[number::count]
    changed = staged.damaged(mine)
    return f"{listed(changed)}: the bytes that arrived are not those that were sent" if changed else None


def _missing(model: Any, staged: StagedTensors, request: LoaderRequest) -> str | None:
    """Name the parameters that an update has no tensor for: SGLang gives some models an output layer that theirs lack."""
    return missing(_held_weights(model, staged, request).places, staged.entries)


def missing(held: Iterable[str], sent: Container[str]) -> str | None:
    """Return an error that names the parameters that no tensor is for; None where there are none."""
    left = [name for name in held if name not in sent]
    return f"{listed(left)}: the server's model has it, and no tensor is for it" if left else None


def _held_weights(model: Any, staged: StagedTensors, request: LoaderRequest) -> HeldWeights:
    return HeldWeights(model, {name: entry.shape for name, entry in staged.entries.items()}, request)


def as_sent(tensor: Tensor, dtype: str) -> Tensor:
    """Return a float32 parameter in the dtype that was sent, where that loses nothing: SGLang keeps GLM's routers in float32."""
    if tensor.dtype != torch.float32:
        return tensor
    cast = tensor.to(getattr(torch, dtype))
    return cast if cast.float().equal(tensor) else tensor


def read_request(named_tensors: Sequence[tuple[str, Tensor]]) -> LoaderRequest:
    """Return what the run asks for, of what SGLang calls a loader with."""
    (text, _), *_ = named_tensors
    request = LoaderRequest(**json.loads(text))
    if request.n_stages == 1:
        return request
    from sglang.srt.runtime_context import get_parallel

    return request.at_stage(get_parallel().pp_rank)


def answer(request: LoaderRequest, result: LoaderResult) -> None:
    """Write the result where the run looks for it, which may be before it is there."""
    path = Path(request.answer)
    written = path.with_name(f"{path.name}.part")
    written.write_text(json.dumps(asdict(result)))
    written.replace(path)
