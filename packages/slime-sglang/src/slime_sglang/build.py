"""Building the engine from settings: one server, or a fleet of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_core.assemble import resolve_model
from slime_core.build import BuildContext
from slime_core.config.derive import compute_dtype
from slime_core.config.sections import ClusterSection, ModelSection, TrainSection
from slime_core.errors import ConfigError, Problem
from slime_core.no_trainer import NAMES as NO_TRAINER
from slime_core.protocols import RolloutEngine
from slime_models.checkpoint import read_config

from slime_sglang.addresses import AddressBook
from slime_sglang.engine import SglangEngine
from slime_sglang.fleet import EngineFleet
from slime_sglang.keeper import Keeper
from slime_sglang.key import new_key, read_key
from slime_sglang.layout import Layout, Place, ServedModel, layout_of
from slime_sglang.router import Router
from slime_sglang.seat import Seat
from slime_sglang.section import ROUTED_EXPERTS, FleetSection, SglangSection
from slime_sglang.served_folder import family_of
from slime_sglang.server import gpu_arguments, visible_device
from slime_sglang.stager import stager_of


def create_engine(build: BuildContext) -> RolloutEngine:
    """Return the engine for a run. Entry point `sglang` of the group `slime.engines`."""
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    model_path = section.model_path or build.model_path
    train = build.section(TrainSection)
    dtype = section.dtype if section.dtype != "auto" else compute_dtype(train)
    stager = stager_of(
        model_path,
        None if train.train_backend in NO_TRAINER else family_of(build),
        dtype=dtype,
        section=section,
        disk_dir=Path(train.update_weight_disk_dir or build.run_dir / "weights"),
        keep_files=train.update_weight_disk_keep_files,
        has_disk_dir=train.update_weight_disk_dir is None,
        encoding=train.update_weight_delta_encoding,
    )
    layout = layout_of(fleet, checkpoint=build.section(ModelSection).hf_checkpoint)
    (policy,) = layout.policies
    addresses = fleet.rollout_external_engine_addrs
    places = [Place(0) for _ in addresses] or layout.places(policy)
    if not addresses:
        _check_gpus(layout)
    released = build.section(ClusterSection).offloads_rollout and visible_device() == "cuda"
    own_key, external_key = new_key(), external_key_of(fleet)
    make = functools.partial(
        SglangEngine,
        model_path,
        dtype=dtype,
        key=external_key if addresses else own_key,
        section=section,
        folder=build.run_dir / "sglang",
        routes=ROUTED_EXPERTS in build.engine_needs,
        is_updated=train.train_backend not in NO_TRAINER,
        n_ranks_in_all=layout.num_ranks,
    )
    if (
        not (addresses or fleet.sglang_config or fleet.has_router or fleet.use_fault_tolerance)
        and len(places) == 1
    ):
        return make(stager=stager, **_placed(section, places[0], released))

    def engine_of(seat: int, before: int) -> SglangEngine:
        return make(
            name=f"server-{seat}{_again(before)}",
            address=addresses[seat] if addresses else None,
            **_placed(section, places[seat], released),
        )

    return EngineFleet(
        _seats("engine", len(places), engine_of, fleet),
        section=fleet,
        stager=stager,
        tokenizer=build.tokenizer,
        router=_router(build, len(places), own_key, external_key) if fleet.has_router else None,
        others=[_keeper(build, layout, model, own_key) for model in layout.others],
        keeps=section.pause_mode == "retract",
    )


def context_limit(build: BuildContext) -> int | None:
    """Return the most tokens of prompt and response that the servers take; None where others start or configure them."""
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    if fleet.rollout_external_engine_addrs or fleet.sglang_config is not None:
        return None
    own = str(section.server_args.get("context_length", ""))
    if own.isdecimal():
        return int(own)
    limit = read_config(section.model_path or build.model_path).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


create_engine.context_limit = context_limit  # type: ignore[attr-defined]  # see `slime_core.config.model_fit.context_limit`
create_engine.offers = frozenset({ROUTED_EXPERTS})  # type: ignore[attr-defined]  # see `BuildContext.engine_needs`
create_engine.sees_images = True  # type: ignore[attr-defined]  # see `slime_core.images.SeesImages`


def _placed(section: SglangSection, place: Place, released: bool = False) -> dict[str, Any]:
    """Return what an engine gets at its place; `released` says that it gives its GPUs' memory up while others work."""
    own = {"enable_memory_saver": True} if released else {}
    gpus = gpu_arguments(section.server_args, first=place.first_gpu, count=place.num_gpus)
    return {
        "arguments": {**own, **place.overrides, **gpus},
        "n_ranks": place.num_gpus,
        "role": place.role,
    }


def _seats(
    name: str, count: int, engine_of: Callable[[int, int], SglangEngine], fleet: FleetSection
) -> list[Seat]:
    return [
        Seat(f"{name} {seat}", functools.partial(engine_of, seat), restarts=fleet.rollout_engine_restarts)
        for seat in range(count)
    ]


def _again(before: int) -> str:
    return f"-restart-{before}" if before else ""


def _keeper(build: BuildContext, layout: Layout, model: ServedModel, key: str) -> Keeper:
    """Return the engines of a model that stays as it is."""
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    path = build.model_path if model.model_path is None else resolve_model(model.model_path, build.registry)
    places, config = layout.places(model), read_config(path)

    def engine_of(seat: int, before: int) -> SglangEngine:
        placed = _placed(section, places[seat])
        own = {"served_model_name": model.name, "incremental_streaming_output": False}
        return SglangEngine(
            path,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "auto"),
            section=section,
            folder=build.run_dir / "sglang",
            name=f"{model.name}-server-{seat}{_again(before)}",
            key=key,
            n_ranks_in_all=layout.num_ranks,
            **placed | {"arguments": own | placed["arguments"]},
        )

    return Keeper(
        _seats(model.name, len(places), engine_of, fleet),
        section=fleet,
        register=AddressBook(build.run_dir, model.name),
    )


def _router(build: BuildContext, n_engines: int, own_key: str, external_key: str | None) -> Router:
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    return Router(
        fleet.router_policy or "",
        address=(fleet.sglang_router_ip, fleet.sglang_router_port),
        width=section.server_concurrency * n_engines,
        section=section,
        folder=build.run_dir / "sglang",
        key=own_key if fleet.sglang_router_ip is None else external_key,
    )


def external_key_of(fleet: FleetSection) -> str | None:
    """Return the key of what runs already; None where the settings name none.

    Raises:
        ConfigError: its file cannot be read.
    """
    path = fleet.rollout_external_key_file
    return None if path is None else read_key(path, where="fleet.rollout_external_key_file")


def _check_gpus(layout: Layout) -> None:
    import torch

    if visible_device() == "cuda" and layout.num_gpus > torch.cuda.device_count():
        raise ConfigError(
            [
                Problem(
                    "GPUs of all engines",
                    str(layout.num_gpus),
                    f"at most {torch.cuda.device_count()}, which this process sees",
                    "--rollout-num-gpus or --sglang-config says how many",
                )
            ]
        )
