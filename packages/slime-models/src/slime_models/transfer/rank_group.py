"""`RankGroup`: the process group of transport `nccl`, of the sender and all ranks of all servers, which stays from update to update."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from slime_core.errors import WeightSyncError
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
)
from slime_models.transfer.storage import pauses

#: Keys under which the sender says which group an update goes through, and which library carries its weights.
_GROUP, _BACKEND = "group", "backend"
#: Deadlines of a member, one after the other, that the sender waits for ranks: their servers are called three times before they come.
_MEETING = 6


class RankGroup:
    """One member's side of a group: announcements by gloo, weights by gloo or NCCL.

    Args:
        store: where it forms, by `client_of`; holds `_BACKEND`.
        rank: 0 for the sender.
        channel: of the update that it forms for.
        device: of this member's weights.

    Raises:
        StrangerError: a member does not know the secret.
    """

    def __init__(self, store: Any, rank: int, channel: BroadcastChannel, device: torch.device) -> None:
        self.key, self.size = channel.key, channel.n_receivers + 1
        """Which group it is, and how many members it has."""
        self.store, self._timeout_s = store, channel.timeout_s
        """Where those of the present update meet."""
        self.told: Any = form_group(store, rank, channel)
        is_nccl = store.get(_BACKEND) == b"nccl"
        self._nccl: Any = _nccl_group(store, rank, channel) if is_nccl else None
        self.device = device if is_nccl else torch.device("cpu")
        """Of the tensors that are broadcast."""

    def broadcast(self, flat: Tensor) -> Any:
        """Begin to broadcast a tensor of `device` from rank 0; returns what `wait` waits for."""
        return (self.told if self._nccl is None else self._nccl).broadcast(flat, 0)

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is over. NCCL itself would not notice a member that is lost.

        Raises:
            CalledOffError: the receiving side has called the update off.
            RuntimeError: a member left or hung.
        """
        if self._nccl is not None:
            await_work(work, self.store, timeout_s=self._timeout_s)
        work.wait()

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


def group_of_sender(before: RankGroup | None, channel: BroadcastChannel, device: torch.device) -> RankGroup:
    """Return the group of an update as its sender: the one before, where its ranks are those of the update, or a new one.

    Raises:
        WeightSyncError: two members share a GPU.
        CalledOffError: the receiving side called the update off.
        AbsentError: the ranks did not come in time.
        StrangerError: a member does not know the secret.
    """
    store = client_of(channel)
    store.set(SENDER, "1")
    patience_s = _MEETING * channel.timeout_s
    (count,) = await_keys(store, [EXPECTED], timeout_s=patience_s)
    channel = replace(channel, n_receivers=int(count))
    keys = [receiver_key(rank) for rank in range(1, channel.n_receivers + 1)]
    there = [json.loads(text) for text in await_keys(store, keys, timeout_s=patience_s)]
    if before is not None:
        if before.size == len(there) + 1 and all(each["group"] == before.key for each in there):
            before.store = store
            store.set(_GROUP, before.key)
            return before
        before.close()
    store.set(_BACKEND, _backend([_device_name(device), *(each["device"] for each in there)]))
    store.set(_GROUP, channel.key)
    return RankGroup(store, 0, channel, device)


def group_of_rank(
    before: RankGroup | None, channel: BroadcastChannel, rank: int, device: torch.device
) -> RankGroup:
    """Return the group of an update as a rank of a server; see `group_of_sender`, whose errors it raises, too."""
    store, held = client_of(channel), None if before is None else before.key
    store.set(receiver_key(rank), json.dumps({"group": held, "device": _device_name(device)}))
    (key,) = await_keys(store, [_GROUP], timeout_s=channel.timeout_s)
    if before is not None:
        if key == before.key:
            before.store = store
            return before
        before.close()
    return RankGroup(store, rank, channel, device)


def _device_name(device: torch.device) -> str:
    """Return what tells this device from those of other members: `cpu`, or the GPU's own number."""
    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


def _backend(names: Sequence[str]) -> str:
    """Return the library that carries weights between members with such devices, that of the sender first.

    Raises:
        WeightSyncError: NCCL would have to carry them, and two members are on one GPU.
    """
    if any(name == "cpu" for name in names):
        return "gloo"
    if len(set(names)) < len(names):
        raise WeightSyncError(
            "transport nccl: two members of its group are on one GPU, which NCCL refuses; give servers GPUs of their own, "
            "or --update-weight-transport memory"
        )
    return "nccl"


def _nccl_group(store: Any, rank: int, channel: BroadcastChannel) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=channel.timeout_s)
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, channel.n_receivers + 1, options)
