"""SGLang's custom weight loaders (`--custom-weight-loader`): check a staged update, load it, and fingerprint the result.

They run inside the server. SGLang ends the whole server when a loader raises, so they write their result to a file. Checking
is a call of its own, because SGLang reports a version as soon as the call that names it returns. Of a server with several
tensor-parallel ranks each checks its share of the tensors, loads, and fingerprints the parts that it holds. SGLang's own
`/update_weights_from_distributed` and `/update_weights_from_disk` write weights before anybody can check them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_models.tensor_spec import Shape
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.manifest import listed
from slime_models.transfer.staging import StagedTensors
from torch import Tensor

from slime_sglang.inside.parameters import Index, held_tensors
from slime_sglang.weights.protocol import LoaderRequest, LoaderResult


def check(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Report what is wrong with the update; writes no weight."""
    request = _request(named_tensors)
    try:
        if not Path(request.folder).is_dir():
            raise WeightSyncError(
                f"{request.folder}: the server's host does not see this folder; one that is not the run's host needs "
                "--update-weight-transport disk and an --output-dir that both see under one name"
            )
        staged = StagedTensors(Path(request.folder))
        error = _damaged(staged, request) or _missing(model, staged, request)
    except Exception as problem:  # raising would end the server, which still has its old weights
        error = f"{type(problem).__name__}: {problem}"
    _answer(request, LoaderResult(error=error))


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the update, and report fingerprints of what the model's parameters then hold.

    An error ends the server: its weights may be a mixture of old and new.
    """
    request = _request(named_tensors)
    staged = StagedTensors(Path(request.folder))
    with torch.no_grad():
        model.load_weights(staged.tensors())
        held = {
            name: _fingerprint(_as_sent(tensor, staged.entries[name].dtype), index, staged, name)
            for name, tensor, index in held_tensors(
                model, _shapes(staged), rank=request.rank, n_ranks=request.n_ranks
            )
            if name in staged.entries
        }
    _answer(request, LoaderResult(held=held))


def _fingerprint(held: Tensor, index: Index, staged: StagedTensors, name: str) -> int:
    """Return the fingerprint of what a rank holds, or the whole tensor's where it holds an equal part of it."""
    found, entry = fingerprint(held), staged.entries[name]
    is_part = tuple(held.shape) != entry.shape
    return entry.fingerprint if is_part and found == fingerprint(staged.tensor(name)[index]) else found


def _damaged(staged: StagedTensors, request: LoaderRequest) -> str | None:
    mine = list(staged.entries)[request.rank :: request.n_ranks]
    changed = staged.damaged(mine)
    return f"{listed(changed)}: the bytes that arrived are not those that were sent" if changed else None


def _missing(model: Any, staged: StagedTensors, request: LoaderRequest) -> str | None:
    """Name the parameters that an update has no tensor for: SGLang gives some models an output layer that theirs lack."""
    held = held_tensors(model, _shapes(staged), rank=request.rank, n_ranks=request.n_ranks)
    left = [name for name, *_ in held if name not in staged.entries]
    return f"{listed(left)}: the server's model has it, and no tensor is for it" if left else None


def _as_sent(tensor: Tensor, dtype: str) -> Tensor:
    """Return a float32 parameter in the dtype that was sent, where that loses nothing: SGLang keeps GLM's routers in float32."""
    if tensor.dtype != torch.float32:
        return tensor
    cast = tensor.to(getattr(torch, dtype))
    return cast if cast.float().equal(tensor) else tensor


def _shapes(staged: StagedTensors) -> dict[str, Shape]:
    return {name: entry.shape for name, entry in staged.entries.items()}


def _request(named_tensors: Sequence[tuple[str, Tensor]]) -> LoaderRequest:
    (text, _), *_ = named_tensors
    return LoaderRequest(**json.loads(text))


def _answer(request: LoaderRequest, result: LoaderResult) -> None:
    Path(request.answer).write_text(json.dumps(asdict(result)))
