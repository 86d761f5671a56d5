"""Transport `nccl`, by gloo: how transfer and loading overlap, and which library carries the weights."""

from __future__ import annotations

import threading

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_models.transfer.ranks.group import RankGroup
from slime_models.transfer.ranks.receiver import RankReceiver
from slime_models.transfer.ranks.sender import SendingToRanks
from slime_models.transfer.transports.nccl import TRANSPORT, Broadcasting, backend_of

from ..updates import begun, plan_of, tensors


def test_the_next_bucket_is_on_its_way_while_one_is_loaded(storage, monkeypatch):
    n_begun, seen = [], []
    broadcast = RankGroup.broadcast

    def counted(group, flat):
        if threading.current_thread() is not sending:
            n_begun.append(flat.numel())
        return broadcast(group, flat)

    receiver = TRANSPORT.create_receiver(storage)
    plan = plan_of("nccl", receiver.open("1"), "1")
    values = tensors(1)

    def send():
        update = SendingToRanks(plan, [], carrier=Broadcasting, backend=backend_of)
        with update:
            for name, tensor in values.items():
                update.put([(name, tensor)], {name: 0})
            update.end()

    sending = threading.Thread(target=send)
    monkeypatch.setattr(RankGroup, "broadcast", counted)
    sending.start()
    for bucket in RankReceiver(torch.device("cpu")).buckets(begun(receiver, plan, 1).channel, 1):
        seen.append((bucket.entries[0].name, len(n_begun)))
    sending.join()
    assert seen == [("a", 2), ("b", 3), ("c", 3)]


def test_what_carries_the_weights():
    assert backend_of(["cuda GPU-1", "cuda GPU-2", "cuda GPU-3"]) == "nccl"
    assert backend_of(["cuda GPU-1", "cpu"]) == "gloo"
    assert backend_of(["cpu", "cuda GPU-1", "cuda GPU-1"]) == "gloo"
    with pytest.raises(WeightSyncError, match="two members of its group are on one GPU"):
        backend_of(["cuda GPU-1", "cuda GPU-2", "cuda GPU-1"])
