"""Memory for buckets that ranks of servers on the sender's machine read: of a GPU by CUDA's IPC handles, of the host by a memory file."""

from __future__ import annotations

import base64
import os
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from torch import Tensor

from slime_models.transfer.same_host import MemoryAddress, SharedWeights, address_of, this_machine

#: The one place in a memory file.
_ALL = "bucket"
#: What tells one reader's handle from all others.
_Place = tuple[str, int, str, int]
_OUT_OF_REACH = (
    "give servers that share its machine and container, or --update-weight-transport nccl or memory"
)


class SharedBuffer:
    """A sender's memory for one bucket at a time.

    Args:
        n_bytes: its size.
        device: where it lies: the CPU's is a file of memory that no folder shows and that goes with its last user.
        n_ranks: how many read it.
    """

    def __init__(self, n_bytes: int, device: torch.device, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        n_bytes = max(n_bytes, 1)  # what is empty cannot be mapped
        self.tensor: Tensor
        """[n_bytes] uint8."""
        self.handle: Mapping[str, Any]
        """What ranks open it by, in JSON's types."""
        if device.type == "cuda":
            self.tensor = torch.empty(n_bytes, dtype=torch.uint8, device=device)
            # Each of torch's handles counts one reader.
            handles = [_cuda_handle(self.tensor) for _ in range(n_ranks)]
            self.handle = {"machine": this_machine(), "cuda": handles}
        else:
            file = _memory_file(n_bytes)
            weakref.finalize(self, os.close, file)
            self.tensor, address = _mapped(file, n_bytes)
            self.handle = {"host": asdict(address) | {"path": str(address.path)}}


class SharedBuffers:
    """A sender's two buffers, which are filled in turn. The host's stay for the next update, a GPU's do not."""

    def __init__(self) -> None:
        self._buffers: list[SharedBuffer | None] = [None, None]
        self._number = 0

    def next(self, n_bytes: int, device: torch.device, n_ranks: int) -> SharedBuffer:
        """Return the buffer to be filled next, of at least this size."""
        self._number = 1 - self._number
        held = self._buffers[self._number]
        if held is None or not _serves(held, n_bytes, device, n_ranks):
            self._buffers[self._number] = held = None  # before the next one is there
            held = self._buffers[self._number] = SharedBuffer(n_bytes, device, n_ranks)
        return held

    def close(self, *, all_read: bool = True) -> None:
        """Free a GPU's memory, once nobody reads it any more.

        Args:
            all_read: whether every reader has opened its handle and let go of it. After an update that broke off some have not, and
                torch would hold the memory for good: it is freed without them, as what they read is no update.
        """
        if not all_read:
            self._give_up()
        had_gpu = any(held is not None and held.tensor.is_cuda for held in self._buffers)
        self._buffers = [None if held is None or held.tensor.is_cuda else held for held in self._buffers]
        if had_gpu:
            torch.cuda.ipc_collect()

    def _give_up(self) -> None:
        """Count every reader of a GPU's memory as done."""
        for held in self._buffers:
            for handle in () if held is None else held.handle.get("cuda", ()):
                _give_up_cuda(handle)


def _serves(held: SharedBuffer, n_bytes: int, device: torch.device, n_ranks: int) -> bool:
    is_there = held.tensor.device == device and held.tensor.numel() >= n_bytes
    return is_there and (device.type == "cpu" or held.n_ranks == n_ranks)


class OpenedBuffers:
    """A sender's buffers as a rank sees them.

    It has the last two open, as the sender has no more.

    Args:
        device: of the rank's weights.
        keeps: whether the host's stay mapped after `end`.
        open_cuda: opens a handle of a GPU's memory on a device, [n_bytes] uint8; None for CUDA's own way.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        keeps: bool,
        open_cuda: Callable[[Mapping[str, Any], torch.device], Tensor] | None = None,
    ) -> None:
        self._device, self._keeps = device, keeps
        self._open_cuda = open_cuda or _opened_cuda
        self._mapped: dict[str, SharedWeights] = {}
        self._of_gpu: dict[_Place, Tensor] = {}

    def flat(self, handle: Mapping[str, Any], rank: int, n_bytes: int) -> Tensor:
        """Return the first bytes of a buffer, [n_bytes] uint8.

        Args:
            handle: `SharedBuffer.handle`.
            rank: of this reader in the update's group: 1 for the first.
            n_bytes: how many bytes.

        Raises:
            WeightSyncError: this process cannot see it.
        """
        if "host" in handle:
            return self._from_host(handle["host"])[:n_bytes]
        if handle["machine"] != this_machine():
            raise WeightSyncError(
                f"the trainer's GPU is on another machine than this server; {_OUT_OF_REACH}"
            )
        if self._device.type != "cuda":
            raise WeightSyncError(
                "the trainer's weights are on a GPU and this server's are not; give --update-weight-transport memory"
            )
        mine = handle["cuda"][rank - 1]
        place = _place_of(mine)
        opened = self._of_gpu.pop(place, None)
        if opened is None:
            _keep_last(
                self._of_gpu, 1
            )  # before the next one is open: the sender waits for the older one's memory
            opened = self._open_cuda(mine, self._device)
        self._of_gpu[place] = opened
        return opened[:n_bytes]

    def end(self) -> None:
        """Let go of a GPU's memory, so that the sender's is freed; and of the host's, unless it is kept."""
        self._of_gpu.clear()
        if not self._keeps:
            self._mapped.clear()

    def _from_host(self, values: Mapping[str, Any]) -> Tensor:
        places = {name: tuple(place) for name, place in values["places"].items()}
        address = MemoryAddress(
            **{**values, "path": Path(values["path"]), "file": tuple(values["file"]), "places": places}
        )
        name = str(address.path)
        opened = address.opened(self._mapped.pop(name, None))
        room = None if opened is None else opened.room(_ALL, address.n_bytes)
        if opened is None or room is None:
            raise WeightSyncError(
                f"this server, on {socket.gethostname()}, does not see the memory {name} of the trainer's process; "
                f"{_OUT_OF_REACH}"
            )
        self._mapped[name] = opened
        _keep_last(self._mapped, 2)
        return room


def _place_of(handle: Mapping[str, Any]) -> _Place:
    """Return what only one handle has: CUDA's own tells of a whole allocation, in which torch places several buffers."""
    return handle["handle"], handle["offset"], handle["counter"], handle["counter_offset"]


def _keep_last(opened: dict[Any, Any], count: int) -> None:
    """Let go of all but the last ones."""
    for key in list(opened)[:-count]:
        del opened[key]


def _memory_file(n_bytes: int) -> int:
    """Return the descriptor of a new file of host memory."""
    file = os.memfd_create("slime-bucket", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, n_bytes)  # now, as writing to memory that is not there kills the process
    except OSError as error:
        os.close(file)
        raise WeightSyncError(f"no memory for a bucket of {n_bytes:,} bytes: {error.strerror}") from error
    return file


def _mapped(file: int, n_bytes: int) -> tuple[Tensor, MemoryAddress]:
    """Return a memory file as a tensor, and where other processes of this user find it while it is open."""
    path = Path(f"/proc/{os.getpid()}/fd/{file}")
    address = address_of(path, n_bytes=n_bytes, places={_ALL: (0, n_bytes)})
    if address is None:
        raise WeightSyncError(f"this system says nothing that tells its machine from others; {_OUT_OF_REACH}")
    return torch.from_file(str(path), shared=True, size=n_bytes, dtype=torch.uint8), address


def _cuda_handle(tensor: Tensor) -> Mapping[str, Any]:
    """Return a handle to a tensor's memory for one reader in another process."""
    _, handle, size, offset, counter, counter_offset, event, waits = tensor.untyped_storage()._share_cuda_()
    return {
        "handle": base64.b64encode(handle).decode(),
        "size": size,
        "offset": offset,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "waits": waits,
    }


def _give_up_cuda(handle: Mapping[str, Any]) -> None:
    """Count a handle's reader as done, whether or not it has opened it."""
    counter = base64.b64decode(handle["counter"])
    torch.UntypedStorage._release_ipc_counter_cuda(counter, handle["counter_offset"])


def _opened_cuda(handle: Mapping[str, Any], device: torch.device) -> Tensor:
    """Return memory of another process's GPU as a tensor of this one's, [n_bytes] uint8.

    It may be another GPU, which this process need not see: CUDA maps it where the two have a way from one to the other.
    """
    torch.cuda.init()
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index or 0,
            base64.b64decode(handle["handle"]),
            handle["size"],
            handle["offset"],
            base64.b64decode(handle["counter"]),
            handle["counter_offset"],
            base64.b64decode(handle["event"]),
            handle["waits"],
        )
    except RuntimeError as error:
        raise WeightSyncError(
            f"this server's GPU has no way to the memory of the trainer's ({error}); {_OUT_OF_REACH}"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
