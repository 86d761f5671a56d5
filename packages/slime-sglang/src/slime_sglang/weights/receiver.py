"""`create_receiver`: what agrees on the weight updates of the servers, and stages those that are staged in shared memory of their host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.plugins.registry import Registry
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from slime_models.quantization.config import FIELD, read_quantization
from slime_models.quantization.scheme import specs_of
from slime_models.tensor_spec import Spec
from slime_models.transfer.changes import Encoding
from slime_models.transfer.receiver import UpdateReceiver
from slime_models.transfer.storage import UpdateStorage

from slime_sglang.settings.section import SglangSection


def create_receiver(
    model_path: Path,
    family: ModelFamily | None,
    *,
    dtype: str,
    section: SglangSection,
    registry: Registry,
    disk_dir: Path,
    keep_files: bool = False,
    owns_disk_dir: bool = False,
    encoding: Encoding = "xor",
    host: str = "127.0.0.1",
) -> UpdateReceiver:
    """Return the receiver of a model's updates.

    Args:
        model_path: Hugging Face folder of the servers; its `quantization_config` says which tensors they want quantised.
        family: of the model; says which tensors an update must hold. None where the run sends none.
        dtype: storage dtype of all else, as torch spells it.
        section: the engine's settings.
        registry: the installed plugins.
        disk_dir: where transports by disk write.
        keep_files: keep what they wrote for earlier versions.
        owns_disk_dir: whether nobody else writes there.
        encoding: of changes (`disk-delta`).
        host: address of this machine at which `distributed` meets the trainer.
    """
    config = read_config(model_path)
    storage = UpdateStorage(
        specs={} if family is None else _specs(family, config, dtype),
        model_path=model_path,
        staging_dir=section.staging_dir,
        disk_dir=disk_dir,
        keep_files=keep_files,
        owns_disk_dir=owns_disk_dir,
        encoding=encoding,
        timeout_s=section.control_timeout_s,
        host=host,
    )
    return UpdateReceiver(storage, dtype=dtype, registry=registry, quantization=config.get(FIELD))


def _specs(family: ModelFamily, config: Mapping[str, Any], dtype: str) -> dict[str, Spec]:
    architecture = family.architecture(config)
    return specs_of(
        family.hf_shapes(architecture),
        dtype=dtype,
        float32=family.float32(architecture),
        quantization=read_quantization(config),
    )
