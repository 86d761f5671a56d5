"""`RankGroup`: the process group of a sender and the ranks of servers that it sends to, which stays from update to update."""

from __future__ import annotations

import atexit
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from slime_core.runtime.daemon_thread import DaemonThread
from torch import Tensor

from slime_models.transfer.meeting import (
    OFF,
    BroadcastChannel,
    CalledOffError,
    client_of,
    dist,
    form_group,
    view_of,
)
from slime_models.transfer.storage import pauses

#: Variable that PyTorch reads when a group of NCCL is made: what its watchdog does about an error.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_WATCHDOG_FACTOR = 100

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
    n_turns: int = 1
    """How many senders a rank of a server hears, one after the other, each in a group of its own."""


class RankGroup:
    """One member's side of a group: announcements by gloo, weights by gloo or NCCL.

    Args:
        client: connection to the store where it forms. It stays for later updates.
        member: this member.
        channel: of the update that it forms for.
        device: of this member's weights.

    Raises:
        StrangerError: a member does not know the secret.
        CalledOffError: the receiving side has called the update off.
        RuntimeError: a member left or hung.
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
        self._nccl: Any = None
        if is_nccl:
            self._nccl = _nccl_group(store, member.number, own)
            await_call(partial(_connect, self._nccl, device), self._store, timeout_s=self._timeout_s)
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
    _await(work.is_completed, store, timeout_s=timeout_s)


def await_call(call: Callable[[], None], store: Any, *, timeout_s: float) -> None:
    """Make a call that may block for ever, and wait for it as `await_work` does. One that is late is left to a thread of its own.

    Args:
        call: what is called; what it raises is raised here.
        store: where members of the update meet.
        timeout_s: how long it may take.

    Raises:
        CalledOffError: the receiving side has called the update off.
        RuntimeError: it was not over in time.
    """
    thread = DaemonThread("weight-group")
    called = thread.submit(call)
    thread.shutdown(wait=False)
    _await(called.done, store, timeout_s=timeout_s)
    called.result()


def _await(is_over: Callable[[], bool], store: Any, *, timeout_s: float) -> None:
    deadline, waits = time.monotonic() + timeout_s, pauses()
    while not is_over():
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


def _nccl_group(store: Any, rank: int, channel: BroadcastChannel) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Its own deadline ends the process; `await_work` has the one that ends the update, and comes first.
    options._timeout = timedelta(seconds=_WATCHDOG_FACTOR * channel.timeout_s)
    with without_watchdog():
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, channel.n_receivers + 1, options)


def _connect(group: Any, device: torch.device) -> None:
    """Have NCCL connect the members, which it does at the first collective: it blocks until all of them are there."""
    with torch.cuda.device(device):  # a thread has the first device otherwise
        group.broadcast(torch.zeros(1, device=device), 0).wait()
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Have groups of NCCL that are made within the context leave a failure to us: PyTorch's watchdog would end the process of every
    member where one is lost, the trainer's, too, and `abort` is only right without it."""
    before = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WATCHDOG]
        else:
            os.environ[_WATCHDOG] = before
