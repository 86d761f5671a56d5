"""`create_engine`: the engine of a run from its settings, one server or a fleet of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.config.derive import compute_dtype
from slime_core.config.factories import EngineFactory, trainer_factory
from slime_core.errors import ConfigError, Problem
from slime_core.protocols import EngineGpus, Place, RolloutEngine
from slime_core.run.build import resolve_model
from slime_core.runtime.processes.ports import address_towards, is_local_address
from slime_core.weights.sync import wanted_transport
from slime_models.hf.config import read_config
from slime_models.transfer.receiver import UpdateReceiver

from slime_sglang.engine import SglangEngine
from slime_sglang.fleet.address_book import AddressBook
from slime_sglang.fleet.fleet import EngineFleet
from slime_sglang.fleet.replica import Replica
from slime_sglang.fleet.router import Router
from slime_sglang.fleet.supervisor import EngineSupervisor
from slime_sglang.http.api_key import new_key, read_key
from slime_sglang.server.command import gpu_arguments, rank_arguments, visible_device
from slime_sglang.settings.memory import engine_memory, engine_remedies
from slime_sglang.settings.model_family import model_family
from slime_sglang.settings.section import ROUTED_EXPERTS, FleetSection, SglangSection
from slime_sglang.settings.server import (
    ServerSettings,
    both_offload,
    crosses_hosts,
    transport_between_machines,
)
from slime_sglang.settings.topology import (
    EnginePlacement,
    ServedModel,
    ServingTopology,
    gpus_of,
    serving_topology,
)
from slime_sglang.weights.receiver import create_receiver


def _create_engine(build: BuildContext) -> RolloutEngine:
    """Return the engine for a run. Entry point `sglang` of the group `slime.engines`."""
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    train = build.settings.train
    topology = serving_topology(build.settings)
    (policy,) = topology.policies
    addresses = fleet.rollout_external_engine_addrs
    placements = [EnginePlacement(0) for _ in addresses] or topology.placements(policy)
    if not addresses and build.places is None:
        _check_gpus(topology, base=int(section.server_args.get("base_gpu_id") or 0))
    places = build.places
    own_key, external_key = new_key(), external_key_of(fleet)
    is_updated = trainer_factory(train, build.registry).capabilities.learns
    common = ServerSettings(
        model_path=section.model_path or build.model_path,
        dtype=section.dtype if section.dtype != "auto" else compute_dtype(train),
        key=external_key if addresses else own_key,
        section=section,
        folder=build.run_dir / "sglang",
        crosses_hosts=_crosses_hosts(build),
        releases_memory=build.settings.cluster.offloads_rollout,
        returns_routed_experts=ROUTED_EXPERTS in build.engine_needs,
        keeps_cache=train.update_weights_in_flight == "keep",
        is_updated=is_updated,
        why_not_on_cpu=model_family(build).not_served_on_cpu.get("sglang") if is_updated else None,
        n_ranks_in_all=topology.num_ranks,
        health_timeout_s=fleet.health_timeout_s,
    )
    receiver = _receiver(build, common)
    needs_fleet = addresses or fleet.sglang_config or fleet.has_router or fleet.use_fault_tolerance
    if not needs_fleet and len(placements) == 1:
        return SglangEngine(_placed(common, placements[0], places), receiver=receiver)

    def make(number: int, restarts: int) -> SglangEngine:
        settings = replace(
            common,
            name=f"server-{number}{_restart(restarts)}",
            address=addresses[number] if addresses else None,
        )
        return SglangEngine(_placed(settings, placements[number], places))

    return EngineFleet(
        _replicas("engine", len(placements), make, fleet),
        section=fleet,
        receiver=receiver,
        tokenizer=build.tokenizer,
        router=_router(build, len(placements), own_key, external_key) if fleet.has_router else None,
        others=[_supervisor(build, topology, model, own_key) for model in topology.others],
        waits_for_updates=both_offload(build.settings.cluster),
        start_patience_s=train.weight_sync_timeout_s / 2,  # the deadline of what waits for it
    )


def context_limit(build: BuildContext) -> int | None:
    """Return the most tokens of prompt and response that the servers take; None where the run does not configure them."""
    section, fleet = build.section(SglangSection), build.section(FleetSection)
    if fleet.rollout_external_engine_addrs or fleet.sglang_config is not None:
        return None
    own = str(section.server_args.get("context_length", ""))
    limit = read_config(section.model_path or build.model_path).get("max_position_embeddings")
    limit = int(own) if own.isdecimal() else limit
    return limit - _reserved(section.server_args) if isinstance(limit, int) else None


def _reserved(server_args: Mapping[str, Any]) -> int:
    """Return the tokens of the context that SGLang 0.5.23 keeps for what a draft model proposes (`compute_num_reserved_tokens`)."""
    if "speculative_algorithm" not in server_args:
        return 0
    names = ("eagle_topk", "num_steps", "num_draft_tokens")
    given = [str(server_args.get(f"speculative_{name}", "")) for name in names]
    top_k, steps, drafts = (int(text) if text.isdecimal() else 1 for text in given)
    return max(top_k * steps, drafts)


def gpus_of_servers(build: BuildContext) -> EngineGpus:
    """Return the GPUs of all servers that the run starts, of models that are not trained, too."""
    if build.section(FleetSection).rollout_external_engine_addrs:
        return EngineGpus()
    return gpus_of(build.settings)


def _transport(build: BuildContext) -> str | None:
    """Return the transport for servers that a launcher has placed on a cluster of several machines; None for any other, and where the
    trainer does not send by it.
    """
    if build.places is None or build.host.startswith("127."):
        return None
    found = transport_between_machines(build.settings)
    sends = trainer_factory(build.settings.train, build.registry).capabilities
    return found if sends.takes(found) else None


#: The entry point `sglang` of `slime.engines`.
create_engine = EngineFactory(
    _create_engine,
    SglangEngine.capabilities,
    context_limit,
    gpus=gpus_of_servers,
    transport=_transport,
    memory=engine_memory,
    remedies=engine_remedies,
)


def _receiver(build: BuildContext, settings: ServerSettings) -> UpdateReceiver:
    """Return what receives the weight updates of the policy."""
    train = build.settings.train
    return create_receiver(
        settings.model_path,
        model_family(build) if settings.is_updated else None,
        dtype=settings.dtype,
        section=settings.section,
        registry=build.registry,
        disk_dir=Path(train.update_weight_disk_dir or build.run_dir / "weights"),
        keep_files=train.update_weight_disk_keep_files,
        owns_disk_dir=train.update_weight_disk_dir is None,
        encoding=train.update_weight_delta_encoding,
        host=_host(build),
    )


def _host(build: BuildContext) -> str:
    """Return the address of this machine at which weights meet the ranks of servers."""
    if (given := build.settings.train.update_weight_host) is not None:
        return given
    fleet = build.section(FleetSection)
    elsewhere = [one for one in fleet.rollout_external_engine_addrs if not is_local_address(one)]
    with contextlib.suppress(OSError):  # who joins that server says that there is no way to it
        return address_towards(elsewhere[0]) if elsewhere else build.host
    return build.host


def _crosses_hosts(build: BuildContext) -> bool:
    """Return whether weight updates, if there are any, reach servers on other hosts."""
    train = build.settings.train
    if not trainer_factory(train, build.registry).capabilities.learns:
        return True
    wanted = wanted_transport(train) or _transport(build) or "memory"
    return crosses_hosts(wanted, build.registry, host=_host(build), is_placed=True)


def _placed(
    settings: ServerSettings, placement: EnginePlacement, places: Mapping[int, Place] | None
) -> ServerSettings:
    """Return the settings of a server at a placement: its GPUs, role, and arguments over those that are there.

    At a place of the launcher the server sees no GPUs but its own, and counts them from 0.
    """
    given = {**settings.section.server_args, **settings.arguments, **placement.overrides}
    if settings.address is not None or places is None:
        own, first = [], placement.first_gpu
        gpus = gpu_arguments(given, first=first, count=placement.num_gpus)
    else:
        last = placement.first_gpu + placement.num_gpus
        own = [places[first] for first in sorted(places) if placement.first_gpu <= first < last]
        gpus = rank_arguments(given, placement.num_gpus)
    return replace(
        settings,
        places=own,
        arguments={**settings.arguments, **placement.overrides, **gpus},
        n_ranks=placement.num_gpus,
        role=placement.role,
    )


def _replicas(
    name: str, count: int, make: Callable[[int, int], SglangEngine], fleet: FleetSection
) -> list[Replica]:
    """Return `count` replicas; `make` gets the number of the replica and of the engines that it had before."""
    restarts = fleet.rollout_engine_restarts
    return [Replica(f"{name} {number}", partial(make, number), restarts=restarts) for number in range(count)]


def _restart(number: int) -> str:
    return f"-restart-{number}" if number else ""


def _supervisor(
    build: BuildContext, topology: ServingTopology, model: ServedModel, key: str
) -> EngineSupervisor:
    """Return the engines of a model that is not trained."""
    fleet = build.section(FleetSection)
    path = build.model_path if model.model_path is None else resolve_model(model.model_path, build.registry)
    placements, config = topology.placements(model), read_config(path)
    places = build.places
    common = ServerSettings(
        model_path=path,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "auto"),
        section=build.section(SglangSection),
        folder=build.run_dir / "sglang",
        arguments={"served_model_name": model.name, "incremental_streaming_output": False},
        key=key,
        n_ranks_in_all=topology.num_ranks,
        health_timeout_s=fleet.health_timeout_s,
    )

    def make(number: int, restarts: int) -> SglangEngine:
        settings = replace(common, name=f"{model.name}-server-{number}{_restart(restarts)}")
        return SglangEngine(_placed(settings, placements[number], places))

    return EngineSupervisor(
        _replicas(model.name, len(placements), make, fleet),
        section=fleet,
        registry=AddressBook(build.run_dir, model.name),
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
        external=[f"http://{address}" for address in fleet.rollout_external_engine_addrs],
    )


def external_key_of(fleet: FleetSection) -> str | None:
    """Return the API key of external servers and of a router that is joined; None where the settings name none.

    Raises:
        ConfigError: its file cannot be read.
    """
    path = fleet.rollout_external_key_file
    return None if path is None else read_key(path, where="fleet.rollout_external_key_file")


def _check_gpus(topology: ServingTopology, *, base: int) -> None:
    """Refuse more GPUs than this process sees, from the first one on that servers get.

    Raises:
        ConfigError: there are fewer.
    """
    import torch

    if visible_device() == "cuda" and base + topology.num_gpus > torch.cuda.device_count():
        raise ConfigError(
            [
                Problem(
                    "GPUs of all engines",
                    f"{topology.num_gpus}" + (f" from GPU {base} on (--sglang-base-gpu-id)" if base else ""),
                    f"at most {torch.cuda.device_count()}, which this process sees",
                    "--rollout-num-gpus or --sglang-config says how many",
                )
            ]
        )
