"""`Stager`: agrees on weight updates and brings each, by whatever transport, to a folder that servers load from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slime_core.errors import WeightSyncError
from slime_core.protocols import TransferPlan
from slime_core.weights import Agreement

from slime_sglang.inlets import INLETS, Inlet, Place, Update


class Stager:
    """Takes updates, one at a time. What was staged last stays until the next update begins.

    Args:
        place: where they come to lie.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._agreement = Agreement()
        self._inlets: dict[str, Inlet] = {name: make(place) for name, make in INLETS.items()}
        self._kept: Path | None = None

    def open(self, transport: str, version: str) -> TransferPlan:
        """Agree on an update by `transport`.

        Raises:
            WeightSyncError: no such transport.
        """
        if transport not in self._inlets:
            raise WeightSyncError(
                f"update to version {version}: transport {transport!r}; wanted one of {list(self._inlets)}"
            )
        channel = self._inlets[transport].open(version)
        return self._agreement.open(
            TransferPlan(transport=transport, version=version, dtype=self._place.dtype, channel=channel)
        )

    @asynccontextmanager
    async def taking(self, plan: TransferPlan) -> AsyncIterator[Update]:
        """Yield an update, to be loaded in the block. An error there says that it was not.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing or misshapen; names it.
            DeltaBaseError: changes do not fit what is kept.
        """
        with self._agreement.taking(plan):
            inlet, place = self._inlets[plan.transport], self._place
            try:
                update = await inlet.arrive(plan)
                yield update
            except BaseException:
                inlet.give_up(plan)
                if place.has_staging:
                    place.staging.forget()
                place.drop_folders(but=self._kept)
                raise
            self._kept = update.folder
            place.drop_folders(but=self._kept)

    def close(self) -> None:
        """Free memory and disk. May be called twice."""
        self._place.drop_folders()
        if self._place.has_staging:
            self._place.staging.remove()
            del self._place.staging
