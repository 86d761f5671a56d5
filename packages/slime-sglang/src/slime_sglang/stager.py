"""`Stager`: agrees on weight updates and brings each, by whatever transport, to a folder that servers load from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slime_core.errors import WeightSyncError
from slime_core.protocols import TransferPlan
from slime_core.weights import Agreement
from slime_models.checkpoint import read_config
from slime_models.family import ModelFamily
from slime_models.transfer.channels import Encoding

from slime_sglang.inlets import INLETS, Inlet, Place, Update
from slime_sglang.section import SglangSection


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
        self._place.close()


def stager_of(
    model_path: Path,
    family: ModelFamily,
    *,
    dtype: str,
    section: SglangSection,
    disk_dir: Path,
    keep_files: bool = False,
    encoding: Encoding = "xor",
) -> Stager:
    """Return what takes the updates of a model.

    Args:
        model_path: Hugging Face folder.
        family: says which tensors an update must hold.
        dtype: of all of them, as torch spells it.
        section: the engine's settings.
        disk_dir: where transports write that go by the disk.
        keep_files: keep what they wrote for earlier versions.
        encoding: of changes.
    """
    return Stager(
        Place(
            shapes=family.hf_shapes(family.architecture(read_config(model_path))),
            dtype=dtype,
            model_path=model_path,
            staging_dir=section.staging_dir,
            disk_dir=disk_dir,
            keep_files=keep_files,
            encoding=encoding,
            # Half, so that a server whose sender hangs can say so before the call to it is over.
            timeout_s=section.control_timeout_s / 2,
        )
    )
