"""`RankGroup`: the process group of the sender and all ranks of all servers, which stays from update to update."""

from __future__ import annotations

import atexit
import json
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from slime_models.transfer.meeting import (
    EXPECTED,
    OFF,
    SENDER,
    BroadcastChannel,
    CalledOffError,
    await_keys,
    client_of,
    dist,
    form_group,
    receiver_key,
    view_of,
)
from slime_models.transfer.storage import pauses

#: Keys under which the sender says which group an update goes through, and which library carries its weights.
_GROUP, _BACKEND = "group", "backend"
#: Deadlines of a member, one after the other, that the sender waits for ranks: their servers are called three times before they come.
_MEETING = 6


_open_groups: weakref.WeakSet[RankGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Leave the groups that are open at the end of the process.

    Threads of a group let go of tensors, for which they need the interpreter: one that asks for it when it has gone aborts the process.
    """
    for group in list(_open_groups):
        group.close()


class RankGroup:
    """One member's side of a group: announcements by gloo, weights by gloo or NCCL.

    Args:
        client: connection to the store where it forms, which holds `_BACKEND` for it. It stays for later updates.
        rank: 0 for the sender.
        channel: of the update that it forms for.
        device: of this member's weights.

    Raises:
        StrangerError: a member does not know the secret.
    """

    def __init__(self, client: Any, rank: int, channel: BroadcastChannel, device: torch.device) -> None:
        self._client, self._address = client, (channel.host, channel.port)
        store = view_of(client, channel)
        self.key, self.size = channel.key, channel.n_receivers + 1
        """Which group it is, and how many members it has."""
        self._store, self._timeout_s = store, channel.timeout_s
        self.told: Any = form_group(store, rank, channel)
        is_nccl = store.get(_BACKEND) == b"nccl"
        self._nccl: Any = _nccl_group(store, rank, channel) if is_nccl else None
        self.device = device if is_nccl else torch.device("cpu")
        """Of the tensors that are broadcast."""
        _open_groups.add(self)

    def broadcast(self, flat: Tensor) -> Any:
        """Begin to broadcast a tensor of `device` from rank 0; returns what `wait` waits for."""
        return (self.told if self._nccl is None else self._nccl).broadcast(flat, 0)

    def meet(self) -> None:
        """Wait until all members call this.

        Raises:
            RuntimeError: a member left or hung.
        """
        self.told.barrier().wait()

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is over. NCCL itself would not notice a member that is lost.

        Raises:
            CalledOffError: the receiving side has called the update off.
            RuntimeError: a member left or hung.
        """
        if self._nccl is not None:
            await_work(work, self._store, timeout_s=self._timeout_s)
        work.wait()

    def client_for(self, channel: BroadcastChannel) -> Any:
        """Return a connection to an update's store: the one that is there, or a new one."""
        return self._client if self._address == (channel.host, channel.port) else client_of(channel)

    def go_on(self, client: Any, channel: BroadcastChannel) -> RankGroup:
        """Serve another update, whose members meet where `client` is connected to; returns this."""
        self._client, self._address = client, (channel.host, channel.port)
        self._store = view_of(client, channel)
        return self

    def close(self) -> None:
        """Leave the group: its connections close, once nobody holds a broadcast of it any more."""
        self.told = None
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None


def await_work(work: Any, store: Any, *, timeout_s: float) -> None:
    """Wait until a collective is over, looking for the update's end meanwhile.

    Args:
        work: what began it returned.
        store: where members of the update meet.
        timeout_s: how long it may take.

    Raises:
        CalledOffError: the receiving side has called the update off.
        RuntimeError: it was not over in time.
    """
    deadline, waits = time.monotonic() + timeout_s, pauses()
    while not work.is_completed():
        if store.check([OFF]):
            raise CalledOffError("the receiving side called it off")
        if time.monotonic() > deadline:
            raise RuntimeError(f"a broadcast was not over after {timeout_s:g} s")
        time.sleep(next(waits))


def forget_frames(error: BaseException) -> None:
    """Let go of what the calls held that an error came from: while they hold a group, its connections stay open, and others wait."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def group_of_sender(
    before: RankGroup | None,
    channel: BroadcastChannel,
    device: torch.device,
    backend: Callable[[Sequence[str]], str],
) -> RankGroup:
    """Return the group of an update as its sender: the one before, where its ranks are those of the update, or a new one.

    Args:
        before: that of the update before.
        channel: of the update.
        device: of the sender's weights.
        backend: returns the library that carries weights between members with such devices, the sender's first: `nccl` or `gloo`.

    Raises:
        WeightSyncError: `backend` refuses the devices.
        CalledOffError: the receiving side called the update off.
        AbsentError: the ranks did not come in time.
        StrangerError: a member does not know the secret.
    """
    client = client_of(channel) if before is None else before.client_for(channel)
    store = view_of(client, channel)
    store.set(SENDER, "1")
    patience_s = _MEETING * channel.timeout_s
    (count,) = await_keys(store, [EXPECTED], timeout_s=patience_s)
    channel = replace(channel, n_receivers=int(count))
    keys = [receiver_key(rank) for rank in range(1, channel.n_receivers + 1)]
    there = [json.loads(text) for text in await_keys(store, keys, timeout_s=patience_s)]
    if before is not None:
        if before.size == len(there) + 1 and all(each["group"] == before.key for each in there):
            store.set(_GROUP, before.key)
            return before.go_on(client, channel)
        before.close()
    store.set(_BACKEND, backend([_device_name(device), *(each["device"] for each in there)]))
    store.set(_GROUP, channel.key)
    return RankGroup(client, 0, channel, device)


def group_of_rank(
    before: RankGroup | None, channel: BroadcastChannel, rank: int, device: torch.device
) -> RankGroup:
    """Return the group of an update as a rank of a server; see `group_of_sender`, whose errors it raises, too."""
    client = client_of(channel) if before is None else before.client_for(channel)
    store, held = view_of(client, channel), None if before is None else before.key
    store.set(receiver_key(rank), json.dumps({"group": held, "device": _device_name(device)}))
    (key,) = await_keys(store, [_GROUP], timeout_s=channel.timeout_s)
    if before is not None:
        if key == before.key:
            return before.go_on(client, channel)
        before.close()
    return RankGroup(client, rank, channel, device)


def _device_name(device: torch.device) -> str:
    """Return what tells this device from those of other members: `cpu`, or the GPU's own number."""
    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


def _nccl_group(store: Any, rank: int, channel: BroadcastChannel) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=channel.timeout_s)
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, channel.n_receivers + 1, options)
