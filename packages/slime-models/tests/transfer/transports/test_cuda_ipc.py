"""Transport `cuda-ipc` in host memory: whose memory a bucket is, when it is written over, and what a server does not see."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.ranks.receiver import RankReceiver
from slime_models.transfer.ranks.shared_buffer import OpenedBuffers, SharedBuffer, SharedBuffers
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.transports.cuda_ipc import TRANSPORT

from ..updates import begun, bits, buckets, plan_of, tensors

CPU = torch.device("cpu")
#: A rank in a process of its own: prints the bytes of each bucket's tensors, which it has before it lets go of the bucket.
RANK = """
import json, sys, torch
from slime_models.transfer.meeting import read_channel
from slime_models.transfer.ranks.receiver import RankReceiver
rank = RankReceiver(torch.device(sys.argv[1]))
found = {}
for bucket in rank.buckets(read_channel(sys.stdin.read()), 1):
    for name, tensor in bucket.tensors.items():
        found[name] = tensor.cpu().reshape(-1).view(torch.uint8).tolist()
print(json.dumps(found))
"""


def open_files():
    """Descriptors of this process that are memory files of buckets."""
    links = [os.readlink(path) if path.exists() else "" for path in Path("/proc/self/fd").iterdir()]
    return sum("slime-bucket" in link for link in links)


def arrives(storage, device, values):
    """What a rank in another process gets of an update."""
    receiver = TRANSPORT.create_receiver(storage)
    plan = plan_of("cuda-ipc", receiver.open("1"), "1")
    sending = WeightSender(asyncio.to_thread, Registry()).send(plan, buckets(values))
    thread = threading.Thread(target=asyncio.run, args=(sending,))
    thread.start()
    channel = json.dumps({**vars(begun(receiver, plan, 1).channel), "memory": None})
    command = [sys.executable, "-c", RANK, device]
    rank = subprocess.run(command, input=channel, capture_output=True, text=True, timeout=120)
    thread.join(60)
    assert rank.returncode == 0, rank.stderr
    return json.loads(rank.stdout)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_rank_in_another_process_gets_every_byte(storage, device):
    values = {name: each.to(device) for name, each in tensors(1).items()}
    assert arrives(storage, device, values) == {name: bits(each).tolist() for name, each in values.items()}


def test_a_bucket_is_the_senders_memory_until_the_rank_is_done_with_it(storage):
    """The sender fills two buffers while the rank has the first bucket, and writes over none that the rank may read."""
    n_tensors = 6
    values = {name: torch.full((130,), float(number)) for number, name in enumerate("abcdef")}
    specs = {name: dataclasses.replace(storage.specs["c"], shape=(130,)) for name in values}
    receiver = TRANSPORT.create_receiver(dataclasses.replace(storage, specs=specs))
    plan, asked = plan_of("cuda-ipc", receiver.open("1"), "1"), []

    async def counted():
        for name, tensor in values.items():
            asked.append(name)
            yield [(name, tensor)], {name: fingerprint(tensor)}

    sending = WeightSender(asyncio.to_thread, Registry()).send(plan, counted())
    thread = threading.Thread(target=asyncio.run, args=(sending,))
    thread.start()
    memory, seen = set(), []
    for number, bucket in enumerate(RankReceiver(CPU).buckets(begun(receiver, plan, 1).channel, 1)):
        (tensor,) = bucket.tensors.values()
        if number == 0:
            while len(asked) < 3:  # two are in its buffers, the third is made
                threading.Event().wait(0.01)
            threading.Event().wait(0.2)
        seen.append(tensor.tolist() == [float(number)] * 130)
        memory.add(tensor.data_ptr())
        assert len(asked) <= number + 3
    thread.join(60)
    assert seen == [True] * n_tensors
    assert len(memory) == 2


def test_the_hosts_buffers_stay_and_go_with_their_sender():
    buffers, before = SharedBuffers(), open_files()
    first = [buffers.next(1000, CPU, 1), buffers.next(10, CPU, 2)]
    buffers.close()
    assert [buffers.next(1000, CPU, 3), buffers.next(10, CPU, 1)] == first
    assert buffers.next(1001, CPU, 1) is not first.pop(0)
    assert open_files() == before + 2
    del buffers, first
    assert open_files() == before


@pytest.mark.parametrize("keeps", [True, False])
def test_a_rank_keeps_the_hosts_memory_mapped_where_it_ends_with_the_run(keeps):
    buffer, opened = SharedBuffer(64, CPU, 1), OpenedBuffers(CPU, keeps=keeps)
    handle = json.loads(json.dumps(buffer.handle))  # as it comes to a rank
    first = opened.flat(handle, 1, 64)
    buffer.tensor.fill_(7)
    assert first.tolist() == [7] * 64
    opened.end()
    assert (opened.flat(handle, 1, 32).data_ptr() == first.data_ptr()) == keeps


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"machine": "another"}, "does not see the memory /proc/"),
        ({"path": "/proc/1/fd/9999"}, "does not see the memory /proc/1/fd/9999"),
        ({"file": [1, 2]}, "does not see the memory /proc/"),
    ],
)
def test_memory_of_another_machine_or_container(changes, found):
    buffer = SharedBuffer(64, CPU, 1)
    handle = {"host": {**buffer.handle["host"], **changes}}
    with pytest.raises(WeightSyncError, match=found) as error:
        OpenedBuffers(CPU, keeps=True).flat(handle, 1, 64)
    assert "--update-weight-transport nccl or memory" in str(error.value)


def test_gpus_of_another_machine_and_servers_without_one():
    (here,) = {SharedBuffer(8, CPU, 1).handle["host"]["machine"]}
    opened = OpenedBuffers(CPU, keeps=True)
    with pytest.raises(WeightSyncError, match="on another machine than this server"):
        opened.flat({"machine": "another", "cuda": []}, 1, 8)
    with pytest.raises(WeightSyncError, match="are on a GPU and this server's are not"):
        opened.flat({"machine": here, "cuda": []}, 1, 8)
