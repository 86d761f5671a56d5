"""Transport `cuda-ipc`: ranks of servers copy buckets straight from the trainer's memory on their machine, a GPU's or the host's.

For GPUs that trainer and servers share (`--colocate`), and for others of the same machines: on each machine one rank of the trainer
sends to the servers there. It puts a bucket into one of two buffers and tells their ranks, which copy from there to their parameters;
meanwhile it fills the other. Nothing is staged or broadcast; handles and announcements (names, shapes, dtypes, fingerprints) go by a
gloo group of each machine. What ranks check, and what becomes of an update that breaks off, is as with `nccl`. Without a GPU the
buffers are memory of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime_models.transfer.ranks.group import RankGroup
from slime_models.transfer.ranks.receiver import BUFFER
from slime_models.transfer.ranks.sender import SendingToRanks
from slime_models.transfer.ranks.shared_buffer import SharedBuffer, SharedBuffers
from slime_models.transfer.ranks.update import RanksReceiver
from slime_models.transfer.transport import OnThread, ThreadSender, Transport


class Sharing:
    """Lends the ranks one bucket after the other. A `Carrier`.

    Args:
        group: of the update.
        buffers: the sender's.
    """

    def __init__(self, group: RankGroup, buffers: SharedBuffers) -> None:
        self._group, self._buffers = group, buffers
        self._lent: SharedBuffer | None = None
        self._is_first, self._is_over = True, False

    def room(self, n_bytes: int, device: torch.device) -> Tensor:
        """Return the buffer that no rank reads any more."""
        self._lent = self._buffers.next(n_bytes, device, self._group.member.size - 1)
        return self._lent.tensor[:n_bytes]

    def told(self) -> Mapping[str, Any]:
        """Return where the bucket is, once it is there."""
        assert self._lent is not None, "room comes first"
        if self._lent.tensor.is_cuda:
            torch.cuda.current_stream(self._lent.tensor.device).synchronize()
        return {BUFFER: self._lent.handle}

    def carry(self, flat: Tensor) -> None:
        """Wait until the ranks are done with the bucket before this one, whose buffer is the next one's."""
        if not self._is_first:
            self._group.meet()
        self._is_first = False

    def end(self) -> None:
        """Wait until the ranks are done with the last bucket."""
        if not self._is_first:
            self._group.meet()
        self._is_over = True

    def close(self) -> None:
        """Free a GPU's memory, once no rank reads it any more; the host's stays for the next update."""
        self._lent = None
        self._buffers.close(all_read=self._is_over)


def _by_gloo(_devices: Sequence[str]) -> str:
    return "gloo"


def _create_sender(on_thread: OnThread) -> ThreadSender:
    carrier = partial(Sharing, buffers=SharedBuffers())
    return ThreadSender(partial(SendingToRanks, groups=[], carrier=carrier, backend=_by_gloo), on_thread)


#: The entry point `cuda-ipc` of `slime.transports`.
TRANSPORT = Transport(
    name="cuda-ipc",
    create_sender=_create_sender,
    create_receiver=partial(RanksReceiver, "cuda-ipc"),
    by_ranks=True,
    shares_gpus=True,
    senders="each_machine",
)
