"""`Stager`: weight updates, whatever the transport: agreed on, and brought to the host of the servers that load them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_core.errors import WeightSyncError
from slime_core.protocols import TransferPlan
from slime_core.weights import Agreement
from slime_models.checkpoint import read_config
from slime_models.family import ModelFamily
from slime_models.quantization.config import FIELD, read_quantization
from slime_models.quantization.scheme import specs_of
from slime_models.transfer.channels import Encoding
from slime_models.transfer.manifest import Spec

from slime_sglang.inlets import INLETS, Inlet, Place
from slime_sglang.section import SglangSection
from slime_sglang.staging import Update


class Stager:
    """Takes updates in, one at a time, and each once, however many servers are to load it.

    Args:
        place: where they come to lie.
        dtype: of tensors that are not quantised, as torch spells it.
        quantization: what the config.json of the servers' folder says about it.
    """

    def __init__(self, place: Place, *, dtype: str, quantization: Mapping[str, Any] | None = None) -> None:
        self._place, self._agreement = place, Agreement()
        self._dtype, self._quantization = dtype, quantization
        self._inlets: dict[str, Inlet] = {name: make(place) for name, make in INLETS.items()}
        self.kept: Update | None = None
        """The newest update, for servers that start later; None where none lies whole any more."""

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
            TransferPlan(
                transport=transport,
                version=version,
                dtype=self._dtype,
                quantization=self._quantization,
                channel=channel,
            )
        )

    @contextmanager
    def taking(self, plan: TransferPlan) -> Iterator[None]:
        """Take the update that was agreed on: let it `arrive`, and have servers load it; an error drops it.

        Raises:
            WeightSyncError: it is not the update agreed on.
        """
        with self._agreement.taking(plan):
            before = self.kept
            try:
                yield
            except BaseException:
                self._inlets[plan.transport].give_up(plan)
                self._place.forget()
                self.kept = None if before is None or self._place.is_staged(before) else before
                raise
            finally:
                self._place.drop_folders(but=self.kept.folder if self.kept is not None else None)

    async def arrive(self, plan: TransferPlan) -> Update:
        """Wait until the update lies whole on this host. No server may be loading an earlier one meanwhile.

        Raises:
            WeightSyncError: a tensor is unknown, misshapen or missing, or the update is another; says which.
            DeltaBaseError: changes do not fit what is kept.
        """
        self.kept = None
        self.kept = await self._inlets[plan.transport].arrive(plan)
        return self.kept

    def close(self) -> None:
        """Free memory and disk. May be called twice."""
        self.kept = None
        self._place.close()


def stager_of(
    model_path: Path,
    family: ModelFamily | None,
    *,
    dtype: str,
    section: SglangSection,
    disk_dir: Path,
    keep_files: bool = False,
    has_disk_dir: bool = False,
    encoding: Encoding = "xor",
) -> Stager:
    """Return what takes updates of a model in.

    Args:
        model_path: Hugging Face folder of the servers; its `quantization_config` says what they want in few bits.
        family: of the model; says which tensors an update must hold. None where nobody sends any: no update fits then.
        dtype: storage dtype of all else, as torch spells it.
        section: the engine's settings.
        disk_dir: where transports write that go by the disk.
        keep_files: keep what they wrote for earlier versions.
        has_disk_dir: whether nobody else writes there.
        encoding: of changes.
    """
    config = read_config(model_path)
    place = Place(
        specs={} if family is None else _specs(family, config, dtype),
        model_path=model_path,
        staging_dir=section.staging_dir,
        disk_dir=disk_dir,
        keep_files=keep_files,
        has_disk_dir=has_disk_dir,
        encoding=encoding,
        timeout_s=section.control_timeout_s,
    )
    return Stager(place, dtype=dtype, quantization=config.get(FIELD))


def _specs(family: ModelFamily, config: Mapping[str, Any], dtype: str) -> dict[str, Spec]:
    architecture = family.architecture(config)
    return specs_of(
        family.hf_shapes(architecture),
        dtype=dtype,
        float32=family.float32(architecture),
        quantization=read_quantization(config),
    )
