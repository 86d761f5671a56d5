"""`create_engine`: the engine of a run from its settings, and what it can be asked before it is built."""

from __future__ import annotations

from pathlib import Path

import torch
from slime_core.config.build import BuildContext
from slime_core.config.derive import compute_dtype
from slime_core.config.factories import EngineFactory
from slime_core.errors import EngineError, PluginError
from slime_core.protocols import TOP_P_TOKENS
from slime_models.family.chosen import family_of_config
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from slime_models.quantization.scheme import specs_of
from slime_models.transfer.receiver import UpdateReceiver
from slime_models.transfer.storage import UpdateStorage

from slime_torch.engine import TorchEngine, context_len, engine_dtype
from slime_torch.memory import engine_memory, engine_remedies
from slime_torch.model.decoder import Decoder
from slime_torch.section import CAPABILITIES, ROUTED_EXPERTS, TorchSection


def _family_of(build: BuildContext) -> ModelFamily:
    folder, named = build.model_path, build.settings.model.model_name
    return family_of_config(build.registry, read_config(folder), folder, named=named)


def context_limit(build: BuildContext) -> int:
    """Return the most tokens of prompt and response that the engine of a run takes."""
    architecture = _family_of(build).architecture(read_config(build.model_path))
    return context_len(build.section(TorchSection), architecture)


def misfit(build: BuildContext) -> str | None:
    """Return why the engine cannot run the model of a run; None where it can, or its family says why. Reads no weights."""
    family = _family_of(build)
    if "torch" in family.not_served:
        return None
    architecture = family.architecture(read_config(build.model_path))
    try:
        Decoder(family, architecture, max_length=1, dtype=torch.float32, device=torch.device("meta"))
    except (EngineError, PluginError) as error:
        return str(error)
    return None


def _create_engine(build: BuildContext) -> TorchEngine:
    """Return the engine for a run. Entry point `torch` of the group `slime.engines`."""
    section, train = build.section(TorchSection), build.settings.train
    dtype = engine_dtype(section.dtype, trained_in=compute_dtype(train))
    return TorchEngine(
        build.model_path,
        _family_of(build),
        build.tokenizer,
        dtype=dtype,
        section=section,
        receiver=_receiver(build, dtype),
        with_sampling_masks=TOP_P_TOKENS in build.engine_needs,
        with_routes=ROUTED_EXPERTS in build.engine_needs,
        keeps_cache=train.update_weights_in_flight == "keep",
    )


def _receiver(build: BuildContext, dtype: torch.dtype) -> UpdateReceiver:
    """Return what receives weight updates; what does not come by `memory` is staged in the run's folder."""
    train, family = build.settings.train, _family_of(build)
    architecture, name = family.architecture(read_config(build.model_path)), str(dtype).removeprefix("torch.")
    storage = UpdateStorage(
        specs=specs_of(family.hf_shapes(architecture), dtype=name, float32=family.float32(architecture)),
        model_path=build.model_path,
        staging_dir=build.run_dir / "torch",
        disk_dir=Path(train.update_weight_disk_dir or build.run_dir / "weights"),
        keep_files=train.update_weight_disk_keep_files,
        owns_disk_dir=train.update_weight_disk_dir is None,
        encoding=train.update_weight_delta_encoding,
        timeout_s=train.weight_sync_timeout_s,
        host=train.update_weight_host or build.host,
    )
    return UpdateReceiver(storage, dtype=name, registry=build.registry)


#: The entry point `torch` of `slime.engines`.
create_engine = EngineFactory(
    _create_engine, CAPABILITIES, context_limit, memory=engine_memory, remedies=engine_remedies
)
