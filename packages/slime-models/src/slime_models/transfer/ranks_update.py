"""`RanksUpdate`: an update that nobody stages: the ranks of servers are to join the sender, and receive it themselves."""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.protocols import Fingerprint

from slime_models.tensor_spec import Spec
from slime_models.transfer.meeting import BroadcastChannel


class RanksUpdate:
    """An update that has begun, and that the ranks of the servers are to join.

    Args:
        version: of the update.
        channel: of its plan.
        specs: every tensor that it must have, by Hugging Face name.
    """

    def __init__(self, *, version: str, channel: BroadcastChannel, specs: Mapping[str, Spec]) -> None:
        self.version, self.channel, self.specs = version, channel, specs
        self.fingerprint: Fingerprint = {}
        """Fingerprints that the sender announced; known once a server has loaded it."""
        self._next_rank = 1

    def take_ranks(self, count: int) -> int:
        """Return the first of `count` ranks of the group in a row, which nobody else has."""
        first, self._next_rank = self._next_rank, self._next_rank + count
        return first
