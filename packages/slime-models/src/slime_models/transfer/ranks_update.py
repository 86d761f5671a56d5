"""`RanksUpdate`: an update that nobody stages: the ranks of servers are to join the sender, and receive it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slime_core.protocols import Fingerprint

from slime_models.tensor_spec import Spec
from slime_models.transfer.meeting import BroadcastChannel, MeetingPlace


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
