"""`Updates`: weight updates, whatever the transport: agreed on, and brought to where servers load them from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights import Agreement
from slime_models.checkpoint import read_config
from slime_models.family import ModelFamily
from slime_models.transfer.channels import Encoding

from slime_sglang.inlets import INLETS, CallLoader, FindFolder, Inlet, Place
from slime_sglang.section import SglangSection


class Updates:
    """Takes updates, one at a time.

    Args:
        place: where they come to lie.
    """

    def __init__(self, place: Place) -> None:
        self._place, self._agreement = place, Agreement()
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

    async def receive(
        self, plan: TransferPlan, load: Callable[[str, FindFolder], Awaitable[Fingerprint]]
    ) -> Fingerprint:
        """Take an update in and have it loaded; returns the fingerprints of what is held then.

        Args:
            plan: what was agreed on.
            load: loads a version, from the folder that it is told.

        Raises:
            WeightSyncError: it is not the update agreed on, or a tensor is unknown, missing, misshapen or damaged;
                names it.
        """
        with self._agreement.taking(plan):
            inlet, place = self._inlets[plan.transport], self._place
            found = self._kept

            async def find(call: CallLoader) -> Path:
                nonlocal found
                found = await inlet.folder(plan, call)
                return found

            try:
                await inlet.arrive(plan)
                held = await load(plan.version, find)
            except BaseException:
                inlet.give_up(plan)
                if place.has_staging:
                    place.staging.forget()
                place.drop_folders(but=self._kept)
                raise
            self._kept = found
            place.drop_folders(but=self._kept)
            return held

    def close(self) -> None:
        """Free memory and disk. May be called twice."""
        self._place.close()


def updates_of(
    model_path: Path,
    family: ModelFamily,
    *,
    dtype: str,
    section: SglangSection,
    disk_dir: Path,
    keep_files: bool = False,
    encoding: Encoding = "xor",
) -> Updates:
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
    return Updates(
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
