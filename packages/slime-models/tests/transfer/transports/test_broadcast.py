"""Transport `distributed`: what arrives, and what happens when either side fails."""

from __future__ import annotations

import dataclasses
import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.runtime.processes.ports import address_towards
from slime_models.tensor_spec import Spec
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.manifest import check_manifest
from slime_models.transfer.meeting import BroadcastChannel, call_off, open_store
from slime_models.transfer.staging import StagedTensors, StagingFolder
from slime_models.transfer.transports.broadcast import Broadcast, receive_broadcast

from ..updates import SHAPES, bits, plan_of, tensors


@pytest.fixture
def meeting():
    """A store and the channel of a group that meets there."""
    store = open_store("127.0.0.1", 60)
    channel = BroadcastChannel(
        host="127.0.0.1", port=store.port, key="k", secret="s", n_receivers=1, timeout_s=60
    )
    return store, channel


def rooms(memory):
    """Memory for each name in turn, until there is none left."""
    places = {}

    def room(name, n_bytes):
        begin = sum(place.numel() for place in places.values())
        if begin + n_bytes > len(memory):
            return None
        places[name] = memory[begin : begin + n_bytes]
        return places[name]

    return room, places


def broadcast(channel, work, room):
    """Run a sender's work and a receiver side by side; returns what the receiver returns or raises."""

    def sending():
        with Broadcast(plan_of("distributed", channel)) as sender:
            work(sender)

    with ThreadPoolExecutor(2) as threads:
        received = threads.submit(receive_broadcast, channel, 1, room)
        sent = threads.submit(sending)
        return sent, received


def test_a_broadcast_brings_every_byte(meeting):
    values = tensors(1, torch.bfloat16)

    def work(sender):
        names = list(values)
        for bucket in (names[:2], names[2:]):
            sender.put(
                [(name, values[name]) for name in bucket],
                {name: fingerprint(values[name]) for name in bucket},
            )
        sender.end()

    room, places = rooms(torch.zeros(4096, dtype=torch.uint8))
    _, received = broadcast(meeting[1], work, room)
    manifest = received.result()
    specs = {name: Spec(shape=shape, dtype="bfloat16") for name, shape in SHAPES.items()}
    check_manifest(manifest, specs, version="7")
    for entry in manifest.entries:
        arrived = places.get(entry.name, torch.empty(0, dtype=torch.uint8))
        assert arrived.equal(bits(values[entry.name]))
        assert entry.fingerprint == fingerprint(values[entry.name])


def test_a_receiver_drops_what_it_has_no_room_for_and_says_what_came(meeting):
    def work(sender):
        for name in ("a", "more"):
            sender.put([(name, torch.ones(16))], {name: 1})
        sender.end()

    memory = torch.zeros(64, dtype=torch.uint8)
    _, received = broadcast(meeting[1], work, rooms(memory)[0])
    assert [entry.name for entry in received.result().entries] == ["a", "more"]
    assert memory.equal(bits(torch.ones(16)))


def test_a_sender_that_fails_in_a_broadcast_frees_the_receiver(meeting):
    def work(sender):
        sender.put([("a", torch.ones(16))], {"a": 1})
        raise RuntimeError("no more")

    sent, received = broadcast(meeting[1], work, lambda name, n_bytes: None)
    assert str(sent.exception()) == "no more"
    with pytest.raises(WeightSyncError, match="the sender left or hung"):
        received.result()


def test_a_receiver_that_dies_in_a_broadcast_frees_the_sender(meeting):
    _, channel = meeting
    assert "secret" not in repr(channel)
    program = (
        "import pickle\nfrom slime_models.transfer.transports.broadcast import *\n"
        f"receive_broadcast(pickle.loads({pickle.dumps(channel)!r}), 1, lambda name, n_bytes: None)"
    )
    receiver = subprocess.Popen([sys.executable, "-c", program])
    with (
        receiver,
        pytest.raises(WeightSyncError, match="version 7: a receiver left or hung"),
        Broadcast(plan_of("distributed", channel)) as sender,
    ):
        sender.put([("a", torch.ones(16))], {"a": 1})
        receiver.kill()
        while True:  # what sockets take in advance has an end
            sender.put([("a", torch.ones(100_000))], {"a": 1})
    assert receiver.returncode == -signal.SIGKILL


@pytest.mark.parametrize("stranger", ["sender", "receiver"])
def test_who_does_not_know_the_secret_neither_sends_nor_receives_a_byte(meeting, stranger):
    _, channel = meeting
    other = dataclasses.replace(channel, secret="guessed")
    of_sender, of_receiver = (other, channel) if stranger == "sender" else (channel, other)
    asked = []

    def room(name, n_bytes):
        asked.append(name)

    with ThreadPoolExecutor(2) as threads:
        received = threads.submit(receive_broadcast, of_receiver, 1, room)
        sent = threads.submit(Broadcast(plan_of("distributed", of_sender)).__enter__)
    with pytest.raises(WeightSyncError, match="a member of the group does not know its secret"):
        received.result()
    with pytest.raises(WeightSyncError, match="version 7: no group formed: "):
        sent.result()
    assert asked == []


def test_groups_meet_where_no_other_host_reaches_them(meeting):
    _, channel = meeting
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{channel.port:04X}")
    ]
    assert listening == [f"0100007F:{channel.port:04X}"]  # 127.0.0.1, of this byte order


def test_a_group_meets_at_the_address_that_its_channel_names():
    """127.0.0.2 is an address of this machine that others do not mean by 127.0.0.1."""
    store = open_store("127.0.0.2", 60)
    channel = BroadcastChannel(
        host="127.0.0.2", port=store.port, key="k", secret="s", n_receivers=1, timeout_s=60
    )
    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        stranger.connect(("127.0.0.1", channel.port))
    assert address_towards(f"{channel.host}:{channel.port}") in ("127.0.0.1", "127.0.0.2")
    memory = torch.zeros(64, dtype=torch.uint8)

    def work(sender):
        sender.put([("a", torch.ones(16))], {"a": 1})
        sender.end()

    _, received = broadcast(channel, work, rooms(memory)[0])
    assert [entry.name for entry in received.result().entries] == ["a"]
    assert memory.equal(bits(torch.ones(16)))


def test_an_update_that_is_called_off_frees_the_sender(meeting):
    store, channel = meeting
    call_off(store, channel)
    with pytest.raises(WeightSyncError, match="version 7: the receiving side called it off"):
        Broadcast(plan_of("distributed", channel)).__enter__()


@pytest.fixture
def staging(tmp_path):
    """A receiver's memory for the tensors of these tests."""
    return StagingFolder(
        tmp_path, specs={name: Spec(shape=shape, dtype="float32") for name, shape in SHAPES.items()}
    )


def sent_with(channel, values):
    """Send values in one bucket; returns (manifest, names of tensors whose bytes came through the group)."""
    asked = []

    def work(sender):
        sender.put(list(values.items()), {name: fingerprint(tensor) for name, tensor in values.items()})
        sender.end()

    sent, received = broadcast(channel, work, lambda name, n_bytes: asked.append(name))
    sent.result()
    return received.result(), asked


def test_a_sender_on_the_receiver_s_machine_writes_to_its_memory_and_the_group_carries_no_weights(
    meeting, staging
):
    values = tensors(1)
    values["a"] = values["a"].T.contiguous().T  # not contiguous
    channel = pickle.loads(pickle.dumps(dataclasses.replace(meeting[1], memory=staging.address)))
    manifest, asked = sent_with(channel, values | {"more": torch.ones(3), "c ": torch.ones(130)})
    assert asked == []
    assert [entry.name for entry in manifest.entries] == [
        *values,
        "more",
        "c ",
    ]  # refused by the receiver's check
    kept = dataclasses.replace(manifest, entries=[e for e in manifest.entries if e.name in SHAPES])
    staging.adopt(kept, "7")
    staged = StagedTensors(staging.folder)
    assert staged.damaged() == []
    assert all(staged.tensor(name).equal(tensor) for name, tensor in values.items())


@pytest.mark.parametrize("other", [{"machine": "another"}, {"file": (1, 1)}, {"path": Path("/no/such/file")}])
def test_a_sender_that_does_not_see_the_receiver_s_memory_sends_through_the_group(meeting, staging, other):
    address = dataclasses.replace(staging.address, **other)
    _, asked = sent_with(dataclasses.replace(meeting[1], memory=address), tensors(1))
    assert asked == ["a", "c"]  # b is empty
    assert not staging.room("a", 60).any()


def test_a_tensor_of_another_size_is_not_written_over_its_neighbours(meeting, staging):
    before = {name: torch.full(shape, 3.0) for name, shape in SHAPES.items()}
    staging.begin("6")
    staging.put(list(before.items()), {})
    sent_with(dataclasses.replace(meeting[1], memory=staging.address), {"a": torch.zeros(16)})
    assert all(staging.room(name, 4 * t.numel()).equal(bits(t)) for name, t in before.items())
