"""`RanksUpdate`: an update that nobody stages: the ranks of servers are to join the sender, and receive it themselves."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace

from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan

from slime_models.tensor_spec import Spec
from slime_models.transfer.meeting import BroadcastChannel, MeetingPlace
from slime_models.transfer.storage import UpdateStorage

#: Share of a call's deadline after which a member of a group gives the others up: ranks that wait for one that hangs are to answer
#: their server's call before its deadline, which the one that hangs misses.
_PATIENCE = 0.5


class RanksUpdate:
    """An update whose sender is there, and that ranks of servers are to join.

    Args:
        version: of the update.
        channel: of its plan.
        specs: every tensor that it must have, by Hugging Face name.
        place: where sender and ranks meet.
    """

    def __init__(
        self, *, version: str, channel: BroadcastChannel, specs: Mapping[str, Spec], place: MeetingPlace
    ) -> None:
        self.version, self.channel, self.specs, self._place = version, channel, specs, place
        self.fingerprint: Fingerprint = {}
        """Fingerprints that the sender announced; known once a server has loaded it."""
        self._next_rank = 1

    @functools.cached_property
    def specs_text(self) -> str:
        """`specs` as JSON, made once for all servers: a model with many experts has tens of thousands."""
        return json.dumps(
            {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in self.specs.items()}
        )

    def begin(self, n_ranks: int) -> None:
        """Say how many ranks join, of all servers that are there now; the sender waits for them."""
        self.channel = replace(self.channel, n_receivers=n_ranks)
        self._place.expect(self.channel)

    def take_ranks(self, count: int) -> int:
        """Return the first of `count` ranks of the group in a row, which nobody else has."""
        first, self._next_rank = self._next_rank, self._next_rank + count
        return first

    def call_off(self) -> None:
        """Say that one of the ranks will not come, or has gone: sender and ranks that wait for it leave."""
        self._place.call_off(self.channel)


class RanksReceiver:
    """The receiving half of a transport by ranks in the process of the run: it says where the group meets, and receives nothing itself.

    Args:
        name: of the transport.
        storage: of the updates.
    """

    def __init__(self, name: str, storage: UpdateStorage) -> None:
        self._name, self._storage, self._place = name, storage, MeetingPlace(storage)

    def open(self, version: str) -> BroadcastChannel:
        """Return where sender and ranks meet; how many ranks, the update says once it begins."""
        if not self._storage.has_ranks:
            raise WeightSyncError(
                f"update to version {version}: transport {self._name} is for engines whose servers have ranks of their own; "
                "leave --update-weight-transport away"
            )
        channel = self._place.channel(n_receivers=0)
        return replace(channel, timeout_s=_PATIENCE * channel.timeout_s)

    async def arrive(self, plan: TransferPlan) -> RanksUpdate:
        """Wait until the sender has a bucket."""
        await self._place.sender_comes(plan.channel)
        return RanksUpdate(
            version=plan.version, channel=plan.channel, specs=self._storage.specs, place=self._place
        )

    def give_up(self, plan: TransferPlan) -> None:
        """Call the update off."""
        self._place.call_off(plan.channel)
