"""Transport `nccl`: buckets broadcast from the trainer to every rank of every server, which loads them as they come.

Each pipeline stage of the trainer sends its own weights, one stage after the other, as what a rank of a server takes in is bound by its
own link: what is saved is bringing them to rank 0 first. Each has a group of its own with the ranks, and makes its first buckets
while it waits for its turn. Between GPUs the weights go by NCCL, where either side computes on a CPU by gloo; announcements (names,
shapes, dtypes, fingerprints) go by gloo always. A bucket is one flat tensor. While a rank loads one, the next is on its way into another buffer. Nothing is staged: a
rank proves each bucket by fingerprints of what it then holds, and one that finds a mistake after it has written is not to
be used any more. A group stays for the next update, as NCCL takes seconds to form one; where a member says that it has another
one or none, or an update failed, the next one forms anew.

The ranks are counted when the sender is there. Where one is lost, the group breaks, and all members leave it: by their connections to the
one that is gone and to those that have left, or because the receiving side calls the update off. The ranks say so. The sender
goes on without them, so that all ranks of a trainer come to the end of its buckets: what became of the update, the receiving side says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from torch import Tensor

from slime_models.transfer.ranks.group import RankGroup
from slime_models.transfer.ranks.sender import SendingToRanks
from slime_models.transfer.ranks.update import RanksReceiver
from slime_models.transfer.transport import OnThread, ThreadSender, Transport


class Broadcasting:
    """Broadcasts one bucket after the other. A `Carrier`."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._flat = torch.empty(0, dtype=torch.uint8)

    def room(self, n_bytes: int, device: torch.device) -> Tensor:
        """Return memory of the group's device, which may be the CPU while the tensors' is not."""
        if self._flat.numel() < n_bytes:
            self._flat = torch.empty(n_bytes, dtype=torch.uint8, device=self._group.device)
        return self._flat[:n_bytes]

    def told(self) -> Mapping[str, Any]:
        """Return nothing: the bucket comes next."""
        return {}

    def carry(self, flat: Tensor) -> None:
        """Broadcast it."""
        self._group.wait(self._group.broadcast(flat))

    def end(self) -> None:
        """Return at once: the broadcasts are over."""

    def close(self) -> None:
        """Free the flat tensor."""
        self._flat = torch.empty(0, dtype=torch.uint8)


def backend_of(names: Sequence[str]) -> str:
    """Return the library that carries weights between members with such devices, that of the sender first.

    Raises:
        WeightSyncError: NCCL would have to carry them, and two members are on one GPU.
    """
    if any(name == "cpu" for name in names):
        return "gloo"
    if len(set(names)) < len(names):
        raise WeightSyncError(
            "transport nccl: two members of its group are on one GPU, which NCCL refuses; give servers GPUs of their own, "
            "or --update-weight-transport cuda-ipc or memory"
        )
    return "nccl"


def _create_sender(on_thread: OnThread) -> ThreadSender:
    send = partial(SendingToRanks, groups=[], carrier=Broadcasting, backend=backend_of)
    return ThreadSender(send, on_thread)


#: The entry point `nccl` of `slime.transports`.
TRANSPORT = Transport(
    name="nccl",
    create_sender=_create_sender,
    create_receiver=partial(RanksReceiver, "nccl"),
    crosses_hosts=True,
    by_ranks=True,
    senders="each_stage",
)
