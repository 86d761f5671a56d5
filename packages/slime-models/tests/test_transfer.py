"""Transports: changes of tensors, folders that appear whole, broadcasts, and what a sender does when something fails."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import TransferPlan
from slime_models.checkpoint import HfCheckpoint
from slime_models.fingerprint import fingerprint
from slime_models.quantization.scheme import specs_of
from slime_models.transfer.broadcast import BroadcastSender, call_off, open_store, receive_broadcast
from slime_models.transfer.channels import BroadcastChannel, DeltaChannel, DiskChannel
from slime_models.transfer.delta import apply_changes, encode_changes
from slime_models.transfer.folders import CHANGES
from slime_models.transfer.manifest import Spec, TensorCheck, check_manifest, read_manifest
from slime_models.transfer.sender import WeightSender

SHAPES = {"a": (3, 5), "b": (0, 4), "c": (130,)}


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


async def buckets(values):
    for name, tensor in values.items():
        yield [(name, tensor)], {name: fingerprint(tensor)}


def send(sender, plan, values):
    return asyncio.run(sender.send(plan, buckets(values)))


def plan_of(transport, channel, version="7"):
    return TransferPlan(transport=transport, version=version, dtype="float32", channel=channel)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("n_changed", [0, 1, 7, 70_001])
def test_applied_changes_give_the_new_tensor(encoding, dtype, n_changed):
    old = torch.randn(70_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    new = old.clone()
    places = torch.randperm(len(old), generator=torch.Generator().manual_seed(2))[:n_changed]
    view = bits(new).view(-1, dtype.itemsize)
    view[places, 0] ^= 3  # whatever the number was, it is another now
    data, counted = encode_changes(old, new, encoding)
    assert counted == n_changed
    apply_changes(old, data, n_changed=counted, encoding=encoding, name="w")
    assert torch.equal(bits(old), bits(new))


def test_changes_of_one_element_are_few_bytes():
    old = torch.zeros(1_000_000, dtype=torch.bfloat16)
    new = old.clone()
    new[999_999] = 1.0
    data, counted = encode_changes(old, new, "xor")
    assert counted == 1
    assert len(data) < 30


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "of a longer tensor"])
def test_damaged_changes_are_refused_by_name_and_nothing_is_written(damage):
    old, new = torch.zeros(100), torch.arange(100.0)
    data, counted = encode_changes(old, new, "xor")
    if damage == "flipped":
        data = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    elif damage == "cut":
        data = data[:-1]
    elif damage == "gone":
        data = b""
    else:
        data, counted = encode_changes(torch.zeros(200), torch.arange(200.0), "xor")
    with pytest.raises(WeightSyncError, match=r"model\.w: the changes that arrived are damaged"):
        apply_changes(old, data, n_changed=counted, encoding="xor", name="model.w")
    assert not old.any()


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_text("old weights")
    return folder


def test_disk_leaves_a_hugging_face_folder_with_its_manifest(tmp_path, model_folder):
    target, values = tmp_path / "out", tensors(1)
    sender = WeightSender(asyncio.to_thread)
    sent = send(sender, plan_of("disk", DiskChannel(folder=target, config_from=model_folder)), values)
    written = HfCheckpoint(target)
    assert {name: written[name].tolist() for name in written} == {n: t.tolist() for n, t in values.items()}
    assert (target / "config.json").read_text() == '{"model_type": "llama"}'
    manifest = read_manifest(target)
    assert manifest.version == "7"
    assert {entry.name: entry.fingerprint for entry in manifest.entries} == sent
    assert sender.last_bytes == (15 + 130) * 4


@pytest.mark.parametrize("transport", ["disk", "disk-delta"])
def test_a_sender_that_fails_leaves_no_folder(tmp_path, model_folder, transport):
    target = tmp_path / "out" / "v1"
    channel = (
        DiskChannel(folder=target, config_from=model_folder)
        if transport == "disk"
        else DeltaChannel(folder=target, base=None, encoding="xor")
    )

    async def broken():
        yield [("a", torch.zeros(3))], {"a": 1}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(WeightSender(asyncio.to_thread).send(plan_of(transport, channel), broken()))
    assert list((tmp_path / "out").iterdir()) == []


def test_changes_go_only_to_a_receiver_that_holds_what_was_sent_last(tmp_path):
    sender, values = WeightSender(asyncio.to_thread), tensors(1)

    def sent(number, base, new):
        folder = tmp_path / str(number)
        send(sender, plan_of("disk-delta", DeltaChannel(folder=folder, base=base, encoding="xor")), new)
        return read_manifest(folder), (folder / CHANGES).stat().st_size

    first, n_bytes = sent(1, None, values)
    assert (first.base, n_bytes) == (None, (15 + 130) * 4)
    values["c"][5] += 1
    second, n_bytes = sent(2, first.digest, values)
    assert (second.base, n_bytes < 40) == (first.digest, True)
    assert [entry.n_changed for entry in second.entries] == [0, 0, 1]
    third, n_bytes = sent(3, first.digest, values)  # not what was sent last
    assert (third.base, n_bytes) == (None, (15 + 130) * 4)


def test_weights_have_one_digest_whatever_their_version_and_order(tmp_path):
    def digest(number, values):
        folder = tmp_path / str(number)
        channel = DeltaChannel(folder=folder, base=None, encoding="xor")
        send(WeightSender(asyncio.to_thread), plan_of("disk-delta", channel, version=str(number)), values)
        return read_manifest(folder).digest

    same = digest(1, tensors(1)), digest(2, dict(reversed(tensors(1).items())))
    assert same[0] == same[1]
    assert digest(3, tensors(2)) != same[0]


@pytest.fixture
def meeting():
    """A store and the channel of a group that meets there."""
    store = open_store("127.0.0.1", 60)
    channel = BroadcastChannel(
        host="127.0.0.1", port=store.port, key="k", secret="s", n_receivers=1, timeout_s=60
    )
    return store, channel


def broadcast(channel, work, file, capacity=4096):
    """Run a sender's work and a receiver side by side; returns what the receiver returns or raises."""

    def sending():
        with BroadcastSender(plan_of("distributed", channel)) as sender:
            work(sender)

    with ThreadPoolExecutor(2) as threads:
        received = threads.submit(receive_broadcast, channel, 1, file, capacity=capacity)
        sent = threads.submit(sending)
        return sent, received


def test_a_broadcast_brings_every_byte(meeting, tmp_path):
    values = tensors(1, torch.bfloat16)

    def work(sender):
        for name, tensor in values.items():
            sender.put([(name, tensor)], {name: fingerprint(tensor)})
        sender.end()

    _, received = broadcast(meeting[1], work, tmp_path / "w")
    data = (tmp_path / "w").read_bytes()
    manifest = received.result()
    specs = {name: Spec(shape=shape, dtype="bfloat16") for name, shape in SHAPES.items()}
    check_manifest(manifest, specs, version="7")
    for entry in manifest.entries:
        arrived = data[entry.offset : entry.offset + entry.n_bytes]
        assert arrived == bits(values[entry.name]).numpy().tobytes()
        assert entry.fingerprint == fingerprint(values[entry.name])


def test_tensors_that_their_family_keeps_in_float32_must_come_so():
    specs = specs_of({"w": (2,), "bias": (2,)}, dtype="bfloat16", float32=frozenset({"bias"}))
    check = TensorCheck(specs, version="7")
    check.see("w", (2,), "bfloat16")
    with pytest.raises(WeightSyncError, match=r"bias: found dtype bfloat16; wanted float32"):
        check.see("bias", (2,), "bfloat16")
    check.see("bias", (2,), "float32")
    check.end()


def test_a_receiver_drops_what_is_too_much_and_says_what_came(meeting, tmp_path):
    def work(sender):
        for name in ("a", "more"):
            sender.put([(name, torch.ones(16))], {name: 1})
        sender.end()

    _, received = broadcast(meeting[1], work, tmp_path / "w", capacity=64)
    assert [entry.name for entry in received.result().entries] == ["a", "more"]
    assert (tmp_path / "w").stat().st_size == 64


def test_a_sender_that_fails_in_a_broadcast_frees_the_receiver(meeting, tmp_path):
    def work(sender):
        sender.put([("a", torch.ones(16))], {"a": 1})
        raise RuntimeError("no more")

    sent, received = broadcast(meeting[1], work, tmp_path / "w")
    assert str(sent.exception()) == "no more"
    with pytest.raises(WeightSyncError, match="the sender left or hung"):
        received.result()


def test_a_receiver_that_dies_in_a_broadcast_frees_the_sender(meeting, tmp_path):
    _, channel = meeting
    assert "secret" not in repr(channel)
    program = (
        "import pickle\nfrom slime_models.transfer.broadcast import *\n"
        f"receive_broadcast(pickle.loads({pickle.dumps(channel)!r}), 1, Path({str(tmp_path / 'w')!r}), capacity=4096)"
    )
    receiver = subprocess.Popen([sys.executable, "-c", program])
    with (
        receiver,
        pytest.raises(WeightSyncError, match="version 7: a receiver left or hung"),
        BroadcastSender(plan_of("distributed", channel)) as sender,
    ):
        sender.put([("a", torch.ones(16))], {"a": 1})
        receiver.kill()
        while True:  # what sockets take in advance has an end
            sender.put([("a", torch.ones(100_000))], {"a": 1})
    assert receiver.returncode == -signal.SIGKILL


@pytest.mark.parametrize("stranger", ["sender", "receiver"])
def test_who_does_not_know_the_secret_neither_sends_nor_receives_a_byte(meeting, tmp_path, stranger):
    _, channel = meeting
    other = dataclasses.replace(channel, secret="guessed")
    of_sender, of_receiver = (other, channel) if stranger == "sender" else (channel, other)
    with ThreadPoolExecutor(2) as threads:
        received = threads.submit(receive_broadcast, of_receiver, 1, tmp_path / "w", capacity=64)
        sent = threads.submit(BroadcastSender(plan_of("distributed", of_sender)).__enter__)
    with pytest.raises(WeightSyncError, match="a member of the group does not know its secret"):
        received.result()
    with pytest.raises(WeightSyncError, match="version 7: no group formed: "):
        sent.result()
    assert not (tmp_path / "w").exists()


def test_groups_meet_where_no_other_host_reaches_them(meeting):
    _, channel = meeting
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{channel.port:04X}")
    ]
    assert listening == [f"0100007F:{channel.port:04X}"]  # 127.0.0.1, of this byte order


def test_an_update_that_is_called_off_frees_the_sender(meeting):
    store, channel = meeting
    call_off(store, channel)
    with pytest.raises(WeightSyncError, match="version 7: the receiving side called it off"):
        BroadcastSender(plan_of("distributed", channel)).__enter__()


def test_an_unknown_transport_is_refused_by_name():
    with pytest.raises(WeightSyncError, match=r"transport 'pigeon'.*memory, distributed, disk, disk-delta"):
        send(WeightSender(asyncio.to_thread), plan_of("pigeon", None), {})


def test_a_damaged_manifest_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"version": "7", "entries": [{"name": "a"')
    with pytest.raises(WeightSyncError, match=r"manifest\.json: not the manifest of a weight update"):
        read_manifest(tmp_path)
