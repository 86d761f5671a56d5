"""`RankGroup`: the process group of a sender and the ranks of servers that it sends to, which stays from update to update."""

from __future__ import annotations

import atexit
import json
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import TransferPlan
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
from slime_models.transfer.same_host import this_container
from slime_models.transfer.storage import pauses

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


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What a member of a group knows of it: the sender decides, and tells each rank of a server its own."""

    key: str
    """Which group it is."""
    number: int
    """Of the member: 0 for the sender."""
    size: int
    """How many members the group has."""
    backend: str
    """Library that carries weights: `nccl` or `gloo`."""


class RankGroup:
    """One member's side of a group: announcements by gloo, weights by gloo or NCCL.

    Args:
        client: connection to the store where it forms. It stays for later updates.
        member: this member.
        channel: of the update that it forms for.
        device: of this member's weights.

    Raises:
        StrangerError: a member does not know the secret.
    """

    def __init__(
        self, client: Any, member: Membership, channel: BroadcastChannel, device: torch.device
    ) -> None:
        self._client, self._address = client, (channel.host, channel.port)
        self.member, self._timeout_s = member, channel.timeout_s
        self._store = view_of(client, channel)
        own = replace(channel, key=member.key, n_receivers=member.size - 1)
        store = view_of(client, own)
        self.told: Any = form_group(store, member.number, own)
        is_nccl = member.backend == "nccl"
        self._nccl: Any = _nccl_group(store, member.number, own) if is_nccl else None
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
    plan: TransferPlan,
    device: torch.device,
    backend: Callable[[Sequence[str]], str],
) -> RankGroup | None:
    """Return the group of an update as one of its senders: the one before, where its ranks are those of the update, or a new one.

    Where a rank of the trainer on each machine sends, it has the ranks of servers there: those that see its processes. Without any
    it has no group.

    Args:
        before: that of the update before.
        plan: of the update, as this sender got it.
        device: of the sender's weights.
        backend: returns the library that carries weights between members with such devices, the sender's first: `nccl` or `gloo`.

    Raises:
        WeightSyncError: `backend` refuses the devices.
        CalledOffError: the receiving side called the update off.
        AbsentError: the ranks did not come in time, or another sender.
        StrangerError: a member does not know the secret.
    """
    channel: BroadcastChannel = plan.channel
    client = client_of(channel) if before is None else before.client_for(channel)
    store = view_of(client, channel)
    store.set(SENDER, "1")
    ranks = _served(store, plan)
    if before is not None:
        is_same = before.member.size == len(ranks) + 1
        if is_same and all(each.group == before.member.key for each in ranks.values()):
            _tell(store, ranks, before.member)
            return before.go_on(client, channel)
        before.close()
    if not ranks:
        return None
    own = Membership(
        key=f"{channel.key}-{plan.sender}",
        number=0,
        size=len(ranks) + 1,
        backend=backend([_device_name(device), *(each.device for each in ranks.values())]),
    )
    _tell(store, ranks, own)
    return RankGroup(client, own, channel, device)


@dataclass(frozen=True)
class _Rank:
    """What a rank of a server says when it joins an update."""

    group: str | None
    """Which group it has from the update before."""
    device: str
    container: str


def _served(store: Any, plan: TransferPlan) -> dict[int, _Rank]:
    """Wait for all ranks of servers, and return those that a sender sends to, by their numbers in the update."""
    channel: BroadcastChannel = plan.channel
    patience_s = _MEETING * channel.timeout_s
    if plan.from_each_machine:
        store.set(_sender_key(plan.sender), this_container())
    (count,) = await_keys(store, [EXPECTED], timeout_s=patience_s)
    keys = [receiver_key(rank) for rank in range(1, int(count) + 1)]
    texts = await_keys(store, keys, timeout_s=patience_s)
    ranks = {number: _Rank(**json.loads(text)) for number, text in enumerate(texts, 1)}
    if not plan.from_each_machine:
        return ranks
    senders = await_keys(
        store, [_sender_key(number) for number in range(plan.n_senders)], timeout_s=patience_s
    )
    first = {container: number for number, container in reversed([*enumerate(senders)])}
    if plan.sender == 0:
        for number, each in ranks.items():
            if each.container not in first:
                store.set(_member_key(number), json.dumps(None))
    return {number: each for number, each in ranks.items() if first.get(each.container) == plan.sender}


def _tell(store: Any, ranks: Iterable[int], own: Membership) -> None:
    """Tell ranks of servers that they are members of a sender's group, in this order."""
    for number, rank in enumerate(ranks, 1):
        store.set(_member_key(rank), json.dumps(asdict(replace(own, number=number))))


def group_of_rank(
    before: RankGroup | None, channel: BroadcastChannel, rank: int, device: torch.device
) -> RankGroup:
    """Return the group of an update as a rank of a server; see `group_of_sender`, whose errors it raises, too.

    Raises:
        WeightSyncError: no rank of the trainer that sends is on this machine, where it has to be.
    """
    client = client_of(channel) if before is None else before.client_for(channel)
    store, held = view_of(client, channel), None if before is None else before.member.key
    own = _Rank(held, _device_name(device), this_container())
    store.set(receiver_key(rank), json.dumps(asdict(own)))
    (text,) = await_keys(store, [_member_key(rank)], timeout_s=channel.timeout_s)
    if (told := json.loads(text)) is None:
        raise WeightSyncError(
            f"no rank of the trainer is on the machine and in the container of this server, {socket.gethostname()}; place the "
            "servers on the trainer's machines, or give --update-weight-transport nccl"
        )
    member = Membership(**told)
    if before is not None:
        if member.key == before.member.key:
            return before.go_on(client, channel)
        before.close()
    return RankGroup(client, member, channel, device)


def _sender_key(number: int) -> str:
    """Return the key under which a sender says where it is."""
    return f"sender-{number}"


def _member_key(rank: int) -> str:
    """Return the key under which a rank of a server is told its `Membership`; null where no sender has it."""
    return f"member-{rank}"


def _device_name(device: torch.device) -> str:
    """Return what tells this device from those of other members: `cpu`, or the GPU's own number."""
    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


def _nccl_group(store: Any, rank: int, channel: BroadcastChannel) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=channel.timeout_s)
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, channel.n_receivers + 1, options)
