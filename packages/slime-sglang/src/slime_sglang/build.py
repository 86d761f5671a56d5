"""Building the engine from settings: one server, or a fleet of them."""

from __future__ import annotations

import functools
from pathlib import Path

from slime_core.build import BuildContext
from slime_core.config.derive import compute_dtype
from slime_core.config.sections import TrainSection
from slime_core.errors import ConfigError, Problem
from slime_core.protocols import RolloutEngine

from slime_sglang.engine import SglangEngine
from slime_sglang.fleet import EngineFleet
from slime_sglang.router import Router
from slime_sglang.seat import Seat
from slime_sglang.section import ROUTED_EXPERTS, FleetSection, SglangSection
from slime_sglang.served import family_of
from slime_sglang.server import gpu_arguments, visible_device
from slime_sglang.stager import stager_of


def create_engine(build: BuildContext) -> RolloutEngine:
    """Return the engine for a run. Entry point `sglang` of the group `slime.engines`."""
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    model_path = section.model_path or build.model_path
    train = build.section(TrainSection)
    dtype = section.dtype if section.dtype != "auto" else compute_dtype(train)
    folder = build.run_dir / "sglang"
    stager = stager_of(
        model_path,
        family_of(build),
        dtype=dtype,
        section=section,
        disk_dir=Path(train.update_weight_disk_dir or build.run_dir / "weights"),
        keep_files=train.update_weight_disk_keep_files,
        encoding=train.update_weight_delta_encoding,
    )
    make = functools.partial(
        SglangEngine,
        model_path,
        dtype=dtype,
        section=section,
        folder=folder,
        routes=ROUTED_EXPERTS in build.engine_needs,
    )
    if fleet.is_plain:
        return make(stager=stager)
    addresses = fleet.rollout_external_engine_addrs
    _check_gpus(fleet)

    def engine_of(seat: int, before: int) -> SglangEngine:
        again = f"-restart-{before}" if before else ""
        return make(
            name=f"server-{seat}{again}",
            address=addresses[seat] if addresses else None,
            n_servers=fleet.n_engines,
            arguments=gpu_arguments(section.server_args, first=seat * fleet.rollout_num_gpus_per_engine),
        )

    return EngineFleet(
        [
            Seat(
                f"engine {seat}",
                functools.partial(engine_of, seat),
                restarts=fleet.rollout_engine_restarts,
            )
            for seat in range(fleet.n_engines)
        ],
        section=fleet,
        stager=stager,
        tokenizer=build.tokenizer,
        router=_router(build) if fleet.has_router else None,
    )


create_engine.offers = frozenset({ROUTED_EXPERTS})  # type: ignore[attr-defined]  # see `BuildContext.engine_needs`


def _router(build: BuildContext) -> Router:
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    return Router(
        fleet.router_policy or "",
        address=(fleet.sglang_router_ip, fleet.sglang_router_port),
        width=section.server_concurrency * fleet.n_engines,
        section=section,
        folder=build.run_dir / "sglang",
    )


def _check_gpus(fleet: FleetSection) -> None:
    import torch

    wanted = fleet.rollout_num_gpus or 0
    if visible_device() == "cuda" and wanted > torch.cuda.device_count():
        raise ConfigError(
            [
                Problem(
                    "fleet.rollout_num_gpus",
                    str(wanted),
                    f"at most {torch.cuda.device_count()}, the GPUs that this process sees",
                )
            ]
        )
