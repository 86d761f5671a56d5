"""Transports by ranks, `nccl` by gloo and `cuda-ipc` in host memory: what each rank gets, and what happens when a side fails."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.transfer.fingerprint import copied_fingerprints, fingerprint
from slime_models.transfer.meeting import (
    OFF,
    CalledOffError,
    SenderLostError,
    channel_text,
    proof_of,
    read_channel,
)
from slime_models.transfer.ranks import sender, update
from slime_models.transfer.ranks.group import await_call, await_work
from slime_models.transfer.ranks.receiver import RankReceiver
from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.transports import cuda_ipc, nccl

from ..updates import SHAPES, begun, bits, buckets, plan_of, tensors

CPU = torch.device("cpu")


@pytest.fixture(params=[nccl.TRANSPORT, cuda_ipc.TRANSPORT], ids=lambda each: each.name)
def transport(request):
    return request.param


def joined(rank, channel, number, *, fails_after=None, hangs_until=None):
    """What a rank gets, as (name, bytes), and the fingerprints that were announced."""
    found, sent = {}, {}
    for n_buckets, bucket in enumerate(rank.buckets(channel, number)):
        if n_buckets == fails_after:
            raise KeyError("the rank fails")
        if hangs_until is not None:
            assert hangs_until.wait(60)
        for entry in bucket.entries:
            found[entry.name] = bits(bucket.tensors[entry.name]).clone()
            sent[entry.name] = entry.fingerprint
    return found, sent


class Halves:
    """A sender, the process of the run, and ranks, each on a thread of its own."""

    def __init__(self, transport, storage, n_ranks=2):
        self.transport = transport
        self.sender = WeightSender(asyncio.to_thread, Registry())
        self.receiver = transport.create_receiver(storage)
        self.ranks = [RankReceiver(CPU) for _ in range(n_ranks)]

    def update(self, values, version, **faults):
        """Send an update; returns (what the sender returns or raises, what each rank gets or raises)."""
        senders = self.transport.senders
        plan = plan_of(self.transport.name, self.receiver.open(version), version, senders=senders)

        async def send():
            sent = await self.sender.send(plan, faults.get("buckets", buckets)(values))
            faults.get("sent", lambda: None)()
            return sent

        async def receive():
            update = await self.receiver.arrive(plan)
            assert isinstance(update, RanksUpdate)
            assert (update.version, update.specs.keys()) == (version, SHAPES.keys())
            update.begin(len(self.ranks))
            first = [update.take_ranks(1) for _ in self.ranks]
            assert first == [*range(1, len(first) + 1)]
            channel = read_channel(channel_text(update.channel))  # as it comes to a server
            assert channel == update.channel
            assert update.channel.secret not in repr(update.channel)
            working = [
                asyncio.to_thread(joined, rank, channel, number, **faults.get(f"rank_{number}", {}))
                for rank, number in zip(self.ranks, first, strict=True)
            ]
            return await asyncio.gather(*working, return_exceptions=True)

        async def both():
            return await asyncio.gather(send(), receive(), return_exceptions=True)

        sent, received = asyncio.run(asyncio.wait_for(both(), 60))
        if isinstance(sent, Exception):
            self.receiver.give_up(plan)
        return sent, received


def fingerprints(values):
    return {name: fingerprint(tensor) for name, tensor in values.items()}


async def unsummed(values):
    """Buckets of which nobody has made the fingerprints."""
    for name, tensor in values.items():
        yield [(name, tensor)], {}


def check_arrived(values, sent, received):
    wanted = fingerprints(values)
    assert sent == wanted
    for found, announced in received:
        assert announced == wanted
        assert found.keys() == values.keys()
        assert all(found[name].equal(bits(values[name])) for name in values)


def test_each_rank_gets_every_byte_and_the_group_stays(transport, storage):
    halves = Halves(transport, storage)
    groups = set()
    for version in "123":
        values = tensors(int(version))
        check_arrived(values, *halves.update(values, version))
        groups |= {id(rank._groups[0]) for rank in halves.ranks}
    assert len(groups) == 2


def test_fingerprints_are_made_while_buckets_are_copied(transport, storage):
    halves, values = Halves(transport, storage), tensors(1)
    check_arrived(values, *halves.update(values, "1", buckets=unsummed))
    sent, received = halves.update(values, "2", buckets=unsummed, rank_1={"fails_after": 1})
    assert sent == fingerprints(values)  # also of what is left, which is not sent
    assert isinstance(received[0], KeyError)


def test_the_first_bucket_is_there_before_ranks_of_the_update_before_come(transport, storage, monkeypatch):
    halves, filled, copied = Halves(transport, storage), threading.Event(), []

    def copies(pairs):
        copied.append(len(pairs))
        found = copied_fingerprints(pairs)
        filled.set()
        return found

    class Late(RanksUpdate):
        def begin(self, n_ranks):
            assert filled.wait(20)
            super().begin(n_ranks)

    check_arrived(tensors(1), *halves.update(tensors(1), "1", buckets=unsummed))
    monkeypatch.setattr(sender, "copied_fingerprints", copies)
    monkeypatch.setattr(update, "RanksUpdate", Late)
    check_arrived(tensors(2), *halves.update(tensors(2), "2", buckets=unsummed))
    assert copied == [1, 1, 1]  # each bucket once
    halves.ranks.pop()
    filled.clear()
    check_arrived(tensors(3), *halves.update(tensors(3), "3", buckets=unsummed))
    assert copied[3:] == [1, 0, 1, 1]  # the first again for the ranks that are left, its fingerprints known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_tensors_of_odd_sizes_lie_beside_one_another_in_a_bucket(transport, storage, dtype):
    values = {name: each.to(dtype) for name, each in tensors(1).items()}

    async def one_bucket(values):
        yield list(values.items()), {name: fingerprint(each) for name, each in values.items()}

    check_arrived(values, *Halves(transport, storage).update(values, "1", buckets=one_bucket))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_rank_that_leaves_ends_the_update_and_the_next_one_meets_anew(transport, storage, rank, caplog):
    halves, values = Halves(transport, storage, n_ranks=4), tensors(1)
    check_arrived(values, *halves.update(values, "1"))
    before = halves.ranks[0]._groups[0]
    sent, received = halves.update(values, "2", **{f"rank_{rank}": {"fails_after": 1}})
    assert sent == fingerprints(values)  # it takes what is left, as other ranks of the trainer wait for it
    assert "version 2: a receiver left or hung, and the rest is not sent" in caplog.text
    assert isinstance(received.pop(rank - 1), KeyError)
    lacking = [other for other in received if not isinstance(other, tuple)]  # others may have had all of it
    assert all(isinstance(other, SenderLostError) for other in lacking)
    check_arrived(values, *halves.update(values, "3"))
    assert halves.ranks[0]._groups[0] is not before


def test_a_rank_that_hangs_is_given_up_by_the_others_at_half_of_a_calls_deadline(transport, storage, caplog):
    halves = Halves(transport, dataclasses.replace(storage, timeout_s=12.0))
    values = {name: torch.ones(2**22) for name in "abcd"}  # more than connections hold by themselves
    halves.update(values, "1")
    hang = threading.Event()  # until the sender has come to its end without it
    sent, received = halves.update(values, "2", rank_1={"hangs_until": hang}, sent=hang.set)
    assert sent == fingerprints(values)
    assert "version 2: a receiver left or hung, and the rest is not sent" in caplog.text
    assert isinstance(received[0], SenderLostError)


def test_ranks_that_are_left_meet_anew_without_one_that_is_gone(transport, storage):
    halves, values = Halves(transport, storage), tensors(1)
    check_arrived(values, *halves.update(values, "1"))
    before = halves.ranks[0]._groups[0]
    del halves.ranks[1]
    for version in ("2", "3"):
        check_arrived(values, *halves.update(values, version))
        assert halves.ranks[0]._groups[0] is not before
    assert halves.ranks[0]._groups[0].member.size == 2


@pytest.mark.parametrize("anew", ["sender", "rank"])
def test_a_side_that_was_started_anew_forms_a_new_group_with_the_others(transport, storage, anew):
    halves, values = Halves(transport, storage), tensors(1)
    check_arrived(values, *halves.update(values, "1"))
    if anew == "sender":
        halves.sender = WeightSender(asyncio.to_thread, Registry())
    else:
        halves.ranks[1] = RankReceiver(CPU)
    before = halves.ranks[0]._groups[0]
    for version in ("2", "3"):
        check_arrived(values, *halves.update(values, version))
        assert halves.ranks[0]._groups[0] is not before
    assert halves.ranks[0]._groups[0].member.key == halves.ranks[1]._groups[0].member.key


def test_a_sender_that_fails_frees_the_ranks_and_the_next_update_arrives(transport, storage):
    halves, values = Halves(transport, storage), tensors(1)

    async def breaks(values):
        async for bucket in buckets(values):
            yield bucket
        raise ArithmeticError("no more weights")

    for broken in ("1", "3"):  # while the group forms for it, and with one that is there
        sent, received = halves.update(values, broken, buckets=breaks)
        assert isinstance(sent, ArithmeticError)
        assert all(isinstance(each, WeightSyncError) for each in received)
        assert "the sender left or hung" in str(received[0])
        check_arrived(values, *halves.update(values, str(int(broken) + 1)))


def test_ranks_that_do_not_come_in_time(transport, storage, caplog):
    receiver = transport.create_receiver(dataclasses.replace(storage, timeout_s=0.1))
    plan = plan_of(transport.name, receiver.open("1"), "1")
    begin = time.monotonic()
    asyncio.run(WeightSender(asyncio.to_thread, Registry()).send(plan, buckets(tensors(1))))
    assert time.monotonic() - begin < 30
    assert "the rest is not sent: expected: not there after 0.3 s" in caplog.text


def test_an_update_that_was_called_off_before_it_began(transport, storage, caplog):
    receiver = transport.create_receiver(storage)
    plan = plan_of(transport.name, receiver.open("1"), "1")
    receiver.give_up(plan)
    asyncio.run(WeightSender(asyncio.to_thread, Registry()).send(plan, buckets(tensors(1))))
    assert "the rest is not sent: the receiving side called it off" in caplog.text


def test_an_update_that_is_called_off_while_a_rank_waits_for_another(transport, storage):
    receiver = transport.create_receiver(dataclasses.replace(storage, timeout_s=200))
    plan = plan_of(transport.name, receiver.open("1"), "1")
    with ThreadPoolExecutor(2) as threads:
        sending = WeightSender(asyncio.to_thread, Registry()).send(plan, buckets(tensors(1)))
        sent = threads.submit(asyncio.run, sending)
        update = begun(receiver, plan, 2)
        rank = threads.submit(joined, RankReceiver(CPU), update.channel, 1)
        update.call_off()
        with pytest.raises(SenderLostError, match="called it off"):
            rank.result(60)
        assert sent.result(60) == fingerprints(tensors(1))


class Collective:
    """One that NCCL would have begun, which is over after so many looks."""

    def __init__(self, looks):
        self._looks = looks

    def is_completed(self):
        self._looks -= 1
        return self._looks < 0


def test_a_collective_is_waited_for_until_it_is_over_or_late_or_the_update_is_called_off():
    store = torch.distributed.HashStore()
    await_work(Collective(5), store, timeout_s=60)
    with pytest.raises(RuntimeError, match=r"not over after 0\.1 s"):
        await_work(Collective(10**9), store, timeout_s=0.1)
    store.set(OFF, "1")
    with pytest.raises(CalledOffError):
        await_work(Collective(10**9), store, timeout_s=60)


def test_a_call_that_blocks_is_left_where_it_is_late_or_the_update_is_called_off():
    store, never = torch.distributed.HashStore(), threading.Event()
    done = []
    await_call(lambda: done.append(1), store, timeout_s=60)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        await_call(lambda: done.append(1 // 0), store, timeout_s=60)
    with pytest.raises(RuntimeError, match=r"not over after 0\.1 s"):
        await_call(never.wait, store, timeout_s=0.1)
    store.set(OFF, "1")
    with pytest.raises(CalledOffError):
        await_call(never.wait, store, timeout_s=60)
    never.set()


def test_each_of_a_thousand_ranks_proves_itself_by_bytes_of_its_own():
    draws = [b"a" * 32, b"b" * 32]
    assert len({proof_of("secret", rank, draws) for rank in range(1000)}) == 1000
    assert proof_of("secret", 1, draws) != proof_of("other", 1, draws)


def test_a_rank_without_the_secret_gets_nothing(transport, storage):
    receiver = transport.create_receiver(storage)
    plan = plan_of(transport.name, receiver.open("1"), "1")
    with ThreadPoolExecutor(2) as threads:
        sending = WeightSender(asyncio.to_thread, Registry()).send(plan, buckets(tensors(1)))
        sent = threads.submit(asyncio.run, sending)
        guess = dataclasses.replace(begun(receiver, plan, 1).channel, secret="guess")
        stranger = threads.submit(lambda: list(RankReceiver(CPU).buckets(guess, 1)))
        with pytest.raises(WeightSyncError, match=r"version 1: .*does not know its secret"):
            sent.result()
        with pytest.raises(WeightSyncError, match="does not know its secret"):
            stranger.result()


def test_an_engine_without_ranks_is_refused(transport, storage):
    with pytest.raises(
        WeightSyncError, match=f"version 4: transport {transport.name} is for engines whose servers have"
    ):
        transport.create_receiver(dataclasses.replace(storage, has_ranks=False)).open("4")


#: A process that ends with a group, one side of which waits in vain: prints, after what was registered later, whether they are left.
ENDING = """
import atexit
sides = [None, None]
atexit.register(lambda: print([side.told for side in sides]))
import threading, torch
from slime_models.transfer.meeting import BroadcastChannel, client_of, dist
from slime_models.transfer.ranks import sender, update
from slime_models.transfer.ranks.group import Membership, RankGroup
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
channel = BroadcastChannel(host="127.0.0.1", port=store.port, key="k", secret="s", n_receivers=1, timeout_s=5.0)
def join(rank):
    member = Membership(key="k", number=rank, size=2, backend="gloo")
    sides[rank] = RankGroup(client_of(channel), member, channel, torch.device("cpu"))
threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sides[1].broadcast(torch.zeros(1))
"""


def test_groups_are_left_before_the_interpreter_ends():
    """Threads of a group let go of tensors, for which they need the interpreter; without it they abort the process, now and then."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "[None, None]\n"), ended.stderr
