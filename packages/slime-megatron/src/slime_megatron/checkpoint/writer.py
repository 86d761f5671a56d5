"""`CheckpointWriter`: writes checkpoints to disk, at once or from a copy while training goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from slime_core.errors import CheckpointError
from slime_core.runtime.daemon_thread import DaemonThread
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime_megatron.checkpoint.state import TrainerState, described, planned
from slime_megatron.importing import quiet
from slime_megatron.parallel.process_groups import World
from slime_megatron.settings.manifest import DESCRIPTION

#: A file that this rank writes, as Megatron plans it: its path, its name, its (bytes, tensors).
File = tuple[str, str, tuple[list[tuple[Any, Any]], list[tuple[Any, Tensor]]]]
#: Shape and dtype -> copies on the host.
Copies = dict[tuple[torch.Size, torch.dtype], list[Tensor]]


@dataclass(frozen=True)
class _PendingFolder:
    """A folder that is being written."""

    path: Path
    request: AsyncRequest
    """How Megatron planned it."""
    description: str
    written: Future[dict[int, Any]]
    """What became of each of this rank's files."""


class CheckpointWriter:
    """Writes one checkpoint at a time. Methods are collective over the world, on the thread that trains.

    Megatron plans the files and completes the folder, which all ranks do together. In between each rank writes by
    itself: on a thread of this process, which the end of the process ends too, and which needs no other rank.

    In the background it writes from a copy on the host, in pinned memory if the state is on CUDA, which the next save uses
    again: as much memory as this rank's part of the newest checkpoint.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread = DaemonThread("checkpoint")
        self._copies: Copies = {}
        self._in_flight: list[_PendingFolder] = []

    def save(self, states: Sequence[tuple[TrainerState, Path]], *, in_background: bool) -> None:
        """Write each state into an empty folder that all ranks see, made if it is missing, when the save before is complete.

        In the background the states are copied, and `complete` is to be called later.

        Raises:
            CheckpointError: a rank could not write its part of this or the save before; says which, and why.
        """
        self.complete(wait=True)
        copies: Copies = {}
        for state, folder in states:
            folder.mkdir(parents=True, exist_ok=True)
            with quiet():
                request = planned(state, folder)
                files: list[File] = []
                if request.preload_fn is not None:
                    files = request.async_fn_args[1] if in_background else request.preload_fn()
                if in_background:
                    self._copy(files, copies)
            written = self._thread.submit(_write, request, files)
            self._in_flight.append(
                _PendingFolder(folder, request, json.dumps(described(state), indent=2), written)
            )
        if in_background:
            self._copies = copies  # and those of the save before that had no use are gone
        else:
            self.complete(wait=True)

    def complete(self, *, wait: bool) -> bool:
        """Complete the folders of the last save if every rank has written its part; return whether none is left.

        Args:
            wait: until they have.

        Raises:
            CheckpointError: a rank could not write its part; says which, and why.
        """
        if not self._in_flight:
            return True
        if not wait and not self._world.all_ranks(all(folder.written.done() for folder in self._in_flight)):
            return False
        folders, self._in_flight = self._in_flight, []
        for folder in folders:
            _complete(folder)
        return True

    def close(self) -> None:
        """Wait until nothing is written any more. Of this rank alone."""
        self._thread.shutdown()

    def _copy(self, files: Sequence[File], copies: Copies) -> None:
        """Put copies in the place of the tensors of a folder, and note them; they are those of the save before as far as they are alike."""
        for *_, (_, tensors) in files:
            tensors[:] = [(item, self._copied(tensor, copies)) for item, tensor in tensors]
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _copied(self, tensor: Tensor, copies: Copies) -> Tensor:
        kind = tensor.shape, tensor.dtype
        if alike := self._copies.get(kind):
            copy = alike.pop()
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.setdefault(kind, []).append(copy)
        return copy.copy_(tensor, non_blocking=True)


def _write(request: AsyncRequest, files: Sequence[File]) -> dict[int, Any]:
    """Write this rank's files; return for each what Megatron wants to know of it, or the error."""
    if not files:
        return {}
    transforms, _ = request.async_fn.args
    write = partial(FileSystemWriterAsync.write_preloaded_data, transforms)
    return {i: write(i, file, None, None, True)[1] for i, file in enumerate(files)}


def _complete(folder: _PendingFolder) -> None:
    """Complete a folder once all ranks have written. Collective over the world.

    Source: `AsyncRequest.execute_sync` of megatron-core 0.19.2, whose writer drops the reason of a failure.
    """
    failure = folder.written.exception()
    found = {} if failure else folder.written.result()
    failures = [each for each in (failure, *found.values()) if isinstance(each, BaseException)]
    if folder.request.async_fn_args:
        *_, results = folder.request.async_fn_args
        results.put(failures[0] if failures else found)
    try:
        with quiet():
            for complete in folder.request.finalize_fns:
                complete()
    except CheckpointException as error:
        why = [f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise CheckpointError(f"{folder.path}: {'; '.join(why) or 'another rank could not write'}") from error
    if torch.distributed.get_rank() == 0:
        (folder.path / DESCRIPTION).write_text(folder.description + "\n")
