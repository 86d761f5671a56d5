"""SGLang's custom weight loader for updates that no folder holds: each rank receives the buckets, and loads them as they come."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_models.transfer.fingerprint import fingerprints_of
from slime_models.transfer.manifest import Entry, TensorCheck, listed
from slime_models.transfer.meeting import SenderLostError
from slime_models.transfer.ranks.receiver import RankReceiver, ReceivedBucket
from torch import Tensor

from slime_sglang.inside.held_weights import HeldWeights
from slime_sglang.inside.loader import answer, fingerprints_held, missing, read_request, unequal
from slime_sglang.inside.parameters import STACKED
from slime_sglang.weights.description import UpdateDescription, read_description
from slime_sglang.weights.protocol import LoaderRequest, LoaderResult

#: Attribute of a model: what receives the updates of its rank.
_RECEIVER = "slime_rank_receiver"
#: Matrices that SGLang puts together within one call: where one of them comes, it waits for the other.
_JOINED = STACKED["fused_qkv_a_proj_with_mqa"]


def receive(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Receive an update, load it bucket by bucket, and report fingerprints of what the model's parameters then hold.

    Where something is wrong, the rest is received and not loaded, so that the sender and the other ranks go on. Of a server with
    several pipeline stages each rank does it on another thread, as SGLang hands a call to a stage once the one before has returned,
    and the ranks of all of them join together.
    """
    request = read_request(named_tensors)
    if request.n_stages == 1:
        _receive(model, request)
    else:
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(_receive, model, request), daemon=True).start()


def _receive(model: Any, request: LoaderRequest) -> None:
    device = next(model.parameters()).device
    if device.type == "cuda":  # each thread has a GPU of its own
        torch.cuda.set_device(device)
    loading: _Loading | None = None
    error: Exception | None = None
    is_broken = False
    # Raising would end the server; and a rank that leaves before the end breaks the group for all others.
    try:
        update = read_description(Path(request.folder))
        try:
            loading = _Loading(model, update, request)
        except Exception as problem:
            error = problem
        for bucket in _receiver_of(model, request).buckets(update.channel, request.group_rank or 0):
            if loading is not None and error is None:
                try:
                    loading.load(bucket)
                except Exception as problem:
                    error = problem
        if loading is not None and error is None:
            loading.end()
    except Exception as problem:
        is_broken = error is None and isinstance(problem, SenderLostError)
        error = error or problem
    if loading is not None and error is None:
        result = LoaderResult(sent=loading.sent, held=loading.held)
    else:
        told = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        is_written = loading is not None and loading.is_written
        result = LoaderResult(error=told, is_broken=is_broken, is_written=is_written)
    answer(request, result)


def _receiver_of(model: Any, request: LoaderRequest) -> RankReceiver:
    receiver: RankReceiver | None = model.__dict__.get(_RECEIVER)
    if receiver is None:
        receiver = RankReceiver(next(model.parameters()).device, keeps=request.keeps)
        setattr(model, _RECEIVER, receiver)
    return receiver


class _Loading:
    """Loads the buckets of one update into the model of a rank.

    Args:
        model: of the rank.
        update: which is to be loaded.
        request: for this rank.

    Raises:
        WeightSyncError: the model has a parameter that no tensor is for.
    """

    def __init__(self, model: Any, update: UpdateDescription, request: LoaderRequest) -> None:
        self._specs, self._version = update.specs, update.version
        self._check = TensorCheck(update.specs, version=update.version)
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        self._weights = HeldWeights(model, shapes, request)
        if error := missing(self._weights.places, self._specs):
            raise WeightSyncError(error)
        self._waiting: dict[str, tuple[Entry, Tensor]] = {}
        self.is_written = False
        """Whether a weight was written."""
        self.sent: dict[str, int] = {}
        """Fingerprints that were announced."""
        self.held: dict[str, int] = {}
        """Fingerprints of what the rank holds; see `LoaderResult.held`."""

    @torch.no_grad()
    def load(self, bucket: ReceivedBucket) -> None:
        """Check a bucket, load it, and look at what the model then holds.

        Raises:
            WeightSyncError: the model has no such tensor, or another shape or dtype, or the bytes are not those that were sent.
        """
        if bucket.version != self._version:
            raise WeightSyncError(f"what arrived is version {bucket.version}; wanted {self._version}")
        for entry in bucket.entries:
            self._check.see(entry.name, entry.shape, entry.dtype)
            self.sent[entry.name] = entry.fingerprint
        arrived = self._waiting | {
            entry.name: (entry, bucket.tensors[entry.name]) for entry in bucket.entries
        }
        self._waiting = {
            name: (entry, tensor.clone())
            for name, (entry, tensor) in arrived.items()
            if any(other in self._specs and other not in arrived for other in _joined_with(name))
        }
        self._write({name: each for name, each in arrived.items() if name not in self._waiting})

    def end(self) -> None:
        """Check that nothing is missing.

        Raises:
            WeightSyncError: names tensors that were not sent.
        """
        self._check.end()
        self._weights.end()

    def _write(self, arrived: Mapping[str, tuple[Entry, Tensor]]) -> None:
        entries = {name: entry for name, (entry, _) in arrived.items()}
        places = self._weights.places
        held = {name: places[name] for name in arrived if name in places}
        # Of a tensor that the rank holds whole, damage is found in what the model then holds.
        parts = [name for name, (tensor, _) in held.items() if tuple(tensor.shape) != entries[name].shape]
        came = fingerprints_of((name, arrived[name][1]) for name in parts)
        if changed := unequal(came, entries):
            raise WeightSyncError(f"{listed(changed)}: the bytes that arrived are not those that were sent")
        self.is_written = True
        self._weights.load((name, tensor) for name, (_, tensor) in arrived.items())
        now = fingerprints_held(held, entries, lambda name: arrived[name][1])
        if others := unequal(now, entries):
            raise WeightSyncError(f"{listed(others)}: the model does not hold what was sent")
        self.held |= now


def _joined_with(name: str) -> list[str]:
    """Return the matrices that SGLang needs in the same call as a matrix of this name."""
    parent, _, kind = name.rpartition(".")
    module, _, leaf = parent.rpartition(".")
    return [f"{module}.{other}.{kind}" for other in _JOINED if other != leaf] if leaf in _JOINED else []
