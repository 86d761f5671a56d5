"""Who is in which group of an update: senders and ranks of servers meet at the update's store, and join a group or go on with one."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import TransferPlan

from slime_models.transfer.meeting import (
    EXPECTED,
    SENDER,
    BroadcastChannel,
    await_keys,
    client_of,
    receiver_key,
    view_of,
)
from slime_models.transfer.ranks.group import Membership, RankGroup
from slime_models.transfer.same_host import this_container

#: Deadlines of a member, one after the other, that the sender waits for ranks: their servers are called three times before they come.
_MEETING = 6


def announce_sender(before: RankGroup | None, plan: TransferPlan) -> tuple[Any, Any]:
    """Say that a sender of an update is there, so that servers are paused; returns a connection to its store, and the store.

    May be called again. Of the trainer's pipeline stages the first says so for all.

    Args:
        before: the sender's group of the update before.
        plan: of the update, as this sender got it.
    """
    channel: BroadcastChannel = plan.channel
    client = client_of(channel) if before is None else before.client_for(channel)
    store = view_of(client, channel)
    if not _turn(plan):
        store.set(SENDER, "1")
    if plan.senders == "each_machine":
        store.set(_sender_key(plan.sender), this_container())
    return client, store


def group_of_sender(
    before: RankGroup | None,
    plan: TransferPlan,
    device: torch.device,
    backend: Callable[[Sequence[str]], str],
) -> RankGroup | None:
    """Return the group of an update as one of its senders: the one before, where its ranks are those of the update, or a new one.

    Where a rank of the trainer on each machine sends, it has the ranks of servers there: those that see its processes. Without any
    it has no group. Where one of each pipeline stage sends, all ranks of servers come to it once they have heard those before.

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
    client, store = announce_sender(before, plan)
    turn = _turn(plan)
    ranks = _served(store, plan)
    if turn:  # without a deadline of its own: the receiving side calls the update off
        await_keys(store, [_turn_key(rank, turn) for rank in ranks], timeout_s=math.inf)
    if before is not None:
        is_same = before.member.size == len(ranks) + 1
        if is_same and all(before.member.key in each.groups for each in ranks.values()):
            _tell(store, ranks, before.member, turn)
            return before.go_on(client, channel)
        before.close()
    if not ranks:
        return None
    own = Membership(
        key=f"{channel.key}-{plan.sender}",
        number=0,
        size=len(ranks) + 1,
        backend=backend([_device_name(device), *(each.device for each in ranks.values())]),
        n_turns=plan.n_senders if plan.senders == "each_stage" else 1,
    )
    _tell(store, ranks, own, turn)
    return RankGroup(client, own, channel, device)


def _turn(plan: TransferPlan) -> int:
    """Return how many senders the ranks of servers hear before this one."""
    return plan.sender if plan.senders == "each_stage" else 0


@dataclass(frozen=True)
class _Rank:
    """What a rank of a server says when it joins an update."""

    groups: Sequence[str]
    """Which groups it has from the update before."""
    device: str
    container: str


def _served(store: Any, plan: TransferPlan) -> dict[int, _Rank]:
    """Wait for all ranks of servers, and return those that a sender sends to, by their numbers in the update."""
    channel: BroadcastChannel = plan.channel
    patience_s = _MEETING * channel.timeout_s
    (count,) = await_keys(store, [EXPECTED], timeout_s=patience_s)
    keys = [receiver_key(rank) for rank in range(1, int(count) + 1)]
    texts = await_keys(store, keys, timeout_s=patience_s)
    ranks = {number: _Rank(**json.loads(text)) for number, text in enumerate(texts, 1)}
    if plan.senders != "each_machine":
        return ranks
    senders = await_keys(
        store, [_sender_key(number) for number in range(plan.n_senders)], timeout_s=patience_s
    )
    first = {container: number for number, container in reversed([*enumerate(senders)])}
    if plan.sender == 0:
        for number, each in ranks.items():
            if each.container not in first:
                store.set(_member_key(number, 0), json.dumps(None))
    return {number: each for number, each in ranks.items() if first.get(each.container) == plan.sender}


def _tell(store: Any, ranks: Iterable[int], own: Membership, turn: int) -> None:
    """Tell ranks of servers that they are members of a sender's group, in this order."""
    for number, rank in enumerate(ranks, 1):
        store.set(_member_key(rank, turn), json.dumps(asdict(replace(own, number=number))))


def group_of_rank(
    groups: Sequence[RankGroup], channel: BroadcastChannel, rank: int, device: torch.device, turn: int = 0
) -> RankGroup:
    """Return the group with one sender of an update as a rank of a server; see `group_of_sender`, whose errors it raises, too.

    Args:
        groups: that the rank has, by the turns of their senders: of this update, and behind them those of the update before.
        channel: of the update.
        rank: its number in it.
        device: of its weights.
        turn: of the sender. The group with that of turn 0 says how many there are.

    Raises:
        WeightSyncError: no rank of the trainer that sends is on this machine, where it has to be.
    """
    before = groups[turn] if turn < len(groups) else None
    client = groups[0].client_for(channel) if groups else client_of(channel)
    store = view_of(client, channel)
    if turn:
        store.set(_turn_key(rank, turn), "1")
    else:
        own = _Rank([group.member.key for group in groups], _device_name(device), this_container())
        store.set(receiver_key(rank), json.dumps(asdict(own)))
    (text,) = await_keys(store, [_member_key(rank, turn)], timeout_s=channel.timeout_s)
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


def _member_key(rank: int, turn: int) -> str:
    """Return the key under which a rank of a server is told its `Membership` by the sender of a turn; null where none has it."""
    return f"member-{rank}-{turn}"


def _turn_key(rank: int, turn: int) -> str:
    """Return the key under which a rank of a server says that it has heard all senders before that of a turn."""
    return f"turn-{rank}-{turn}"


def _device_name(device: torch.device) -> str:
    """Return what tells this device from those of other members: `cpu`, or the GPU's own number."""
    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"
