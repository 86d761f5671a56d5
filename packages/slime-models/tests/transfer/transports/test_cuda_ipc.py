"""Transport `cuda-ipc` in host memory: whose memory a bucket is, when it is written over, and what a server does not see."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading
import weakref
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


async def in_buckets(values, names):
    """Buckets with these tensors."""
    for each in names:
        yield [(name, values[name]) for name in each], {name: fingerprint(values[name]) for name in each}


def arrives(storage, device, values, names=None):
    """What a rank in another process gets of an update."""
    receiver = TRANSPORT.create_receiver(storage)
    plan = plan_of("cuda-ipc", receiver.open("1"), "1")
    update = buckets(values) if names is None else in_buckets(values, names)
    sending = WeightSender(asyncio.to_thread, Registry()).send(plan, update)
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_of_all_kinds_arrive_from_small_and_growing_buckets(storage, device):
    """A tensor begins where the one before it ends, whatever its type; and each bucket wants a larger buffer, or a smaller one."""
    drawn = torch.randint(
        0, 256, ((1 << 20) + 64,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
    )
    whole = drawn.to(device)
    values = {
        "scale": whole[:1], "half": whole[1:7].clone().view(torch.bfloat16), "turned": whole[:600].view(20, 30).T,
        "every third": whole[0:900:3], "number": whole[8:16].view(torch.int64)[0], "none": whole[:0].view(0, 4),
        "eighth": whole[5:18].clone().view(torch.float8_e4m3fn), "large": whole[8:].view(-1, 8),
    }  # fmt: skip
    values["tied"] = values["turned"]
    names = [
        ["scale"],
        ["half", "turned", "number"],
        ["none"],
        ["eighth", "every third"],
        ["tied"],
        ["large"],
        ["scale", "half"],
    ]
    found = arrives(storage, device, values, names)
    assert found == {name: bits(each).tolist() for name, each in values.items()}


class Allocation:
    """Memory of a GPU as CUDA's handles tell of it: two buffers may lie in it, and the handle of either is that of the whole.

    It stands in for one with memory of this process's own.
    """

    def __init__(self):
        self.memory, self.opened = torch.arange(256, dtype=torch.uint8), []

    def handle(self, counter, offset, size, n_ranks=1):
        one = {"handle": "of all of it", "size": size, "offset": offset, "counter": "file"}
        machine = SharedBuffer(8, CPU, 1).handle["host"]["machine"]
        return {
            "machine": machine,
            "cuda": [one | {"counter_offset": counter * n_ranks + rank} for rank in range(n_ranks)],
        }

    def open(self, handle, device):
        assert device == torch.device("cuda")
        part = self.memory[handle["offset"] : handle["offset"] + handle["size"]].clone()
        self.opened.append((handle["counter_offset"], weakref.ref(part)))
        return part


def test_buffers_that_lie_in_one_allocation_are_told_apart_and_opened_once():
    gpu = Allocation()
    opened = OpenedBuffers(torch.device("cuda"), keeps=False, open_cuda=gpu.open)
    small, large = gpu.handle(0, 0, 64, n_ranks=2), gpu.handle(1, 64, 130, n_ranks=2)
    for _ in range(2):
        assert opened.flat(small, 2, 30).tolist() == list(range(30))
        assert opened.flat(large, 2, 130).tolist() == list(range(64, 194))
    assert [counter for counter, _ in gpu.opened] == [1, 3]  # those of the second rank
    opened.end()
    assert [ref() for _, ref in gpu.opened] == [None, None]


def test_a_buffer_that_takes_anothers_place_frees_it():
    gpu = Allocation()
    opened = OpenedBuffers(torch.device("cuda"), keeps=False, open_cuda=gpu.open)
    for counter in (0, 1, 0, 2):  # the sender fills two in turn: the third takes the second's place
        opened.flat(gpu.handle(counter, counter, 8), 1, 8)
    assert [ref() is None for _, ref in gpu.opened] == [False, True, False]


def test_a_rank_has_no_more_of_the_hosts_buffers_mapped_than_the_sender_has():
    opened, buffers = OpenedBuffers(CPU, keeps=True), [SharedBuffer(64, CPU, 1) for _ in range(3)]
    for buffer in buffers:
        opened.flat(buffer.handle, 1, 64)
    maps = Path("/proc/self/maps").read_text()
    assert maps.count("slime-bucket") == len(buffers) + 2  # the senders' own besides


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
