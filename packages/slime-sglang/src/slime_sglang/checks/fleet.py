"""Checks of the number of engines, and of external servers."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.derive import is_local
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.runtime.processes.ports import is_local_address
from slime_models.groups import is_by_ranks, shares_gpus

from slime_sglang.checks.disaggregation import disaggregated_topology
from slime_sglang.http.api_key import read_key
from slime_sglang.settings.section import FleetSection, SglangSection, update_problems
from slime_sglang.settings.server import both_offload, crosses_hosts, planned_transport
from slime_sglang.settings.topology import all_gpus, serving_topology

#: Least deadline of a health check, seconds: `health_generate` of SGLang 0.5.23 looks for a token once a second, the first time after one.
_LEAST_HEALTH_TIMEOUT_S = 2.0


def gpu_problems(settings: Settings) -> Iterator[Problem]:
    """Refuse numbers of GPUs and engines that do not add up."""
    fleet = settings.section(FleetSection)
    total, each = all_gpus(settings), fleet.rollout_num_gpus_per_engine
    if total % each and fleet.sglang_config is None and not fleet.rollout_external_engine_addrs:
        is_given = fleet.rollout_num_gpus is not None
        yield Problem(
            "fleet.rollout_num_gpus" if is_given else "fleet.rollout_num_gpus_per_engine",
            f"{total} with rollout_num_gpus_per_engine {each}"
            if is_given
            else f"{each} with cluster.colocate, and {total} GPUs of the trainer",
            f"a multiple of {each}" if is_given else f"a divisor of {total}",
            f"{total % each} would be left over",
        )
    if not is_local(settings.run) and "base_gpu_id" in settings.section(SglangSection).server_args:
        yield Problem(
            "sglang.server_args.base_gpu_id",
            f"it with launcher {settings.run.launcher}",
            "nothing: the launcher gives each server GPUs of its own",
        )
    n_engines, n_reading = total // each, fleet.prefill_num_servers
    if n_reading and fleet.sglang_config is not None:
        yield Problem(
            "fleet.prefill_num_servers",
            f"{n_reading} beside sglang_config",
            "one of them",
            "groups of the file say it by worker_type: prefill and worker_type: decode",
        )
    elif n_reading and n_reading >= n_engines and not fleet.rollout_external_engine_addrs:
        yield Problem(
            "fleet.prefill_num_servers",
            f"{n_reading} of {n_engines} engines",
            f"{n_engines - 1} at most" if n_engines > 1 else "2 engines at least",
            "one has to generate; --rollout-num-gpus says how many engines there are",
        )


def health_problems(fleet: FleetSection) -> Iterator[Problem]:
    """Refuse a deadline of health checks that no server meets, however well it is."""
    if fleet.health_timeout_s is not None and fleet.health_timeout_s < _LEAST_HEALTH_TIMEOUT_S:
        yield Problem(
            "fleet.rollout_health_check_timeout",
            f"{fleet.health_timeout_s:g}",
            f"{_LEAST_HEALTH_TIMEOUT_S:g} at least",
            "SGLang looks for its answer to a health check once a second, the first time after one: engines that are well would be killed",
        )


def external_problems(
    fleet: FleetSection, transport: str | None, registry: Registry, *, host: str | None
) -> Iterator[Problem]:
    """Refuse addresses that are none or that weights do not reach, and settings of engines that the run would start.

    Args:
        fleet: the settings.
        transport: by which weights go to the servers; None where none do.
        registry: the installed plugins.
        host: address of this machine at which ranks of servers meet the trainer, if they do; None for one that they reach.
    """
    addresses = fleet.rollout_external_engine_addrs
    yield from _key_problems(fleet)
    for name, value in (
        ("rollout_num_gpus", fleet.rollout_num_gpus),
        ("sglang_config", fleet.sglang_config),
        ("prefill_num_servers", fleet.prefill_num_servers or None),
    ):
        if addresses and value is not None:
            yield Problem(
                f"fleet.{name}",
                f"{value} beside rollout_external_engine_addrs",
                "one of them",
                "external engines bring their own GPUs and arguments",
            )
    for address in addresses:
        name, _, port = address.rpartition(":")
        if not name or not port.isdecimal() or not 0 < int(port) < 65536 or addresses.count(address) > 1:
            yield Problem(
                "fleet.rollout_external_engine_addrs", repr(address), "host:port, each of them once"
            )
        elif (
            not is_local_address(address) and transport and not crosses_hosts(transport, registry, host=host)
        ):
            yield Problem(
                "train.update_weight_transport",
                f"{transport}, and the engine {address} on another host",
                "disk, in full, or nccl",
                "weights would go by the memory or the loopback address of one host; give --update-weight-transport disk or nccl, "
                "no loopback address as --update-weight-host, and an --output-dir that both see under one name",
            )


def machine_problems(settings: Settings, transport: str | None, registry: Registry) -> Iterator[Problem]:
    """Refuse servers on the machines of several nodes' ranks where weights reach one machine alone.

    Args:
        settings: of the run.
        transport: of its weights; None where none are sent.
        registry: the installed plugins.
    """
    cluster, host = settings.cluster, settings.train.update_weight_host
    if not cluster.colocate or cluster.actor_num_nodes == 1 or transport is None:
        return
    if is_by_ranks(transport, registry) or crosses_hosts(transport, registry, host=host):
        return
    yield Problem(
        "train.update_weight_transport",
        f"{transport} with colocate on {cluster.actor_num_nodes} nodes",
        "cuda-ipc, or disk in full",
        "weights would go by the memory of one host; by cuda-ipc, the default, a rank on each sends to the servers there",
    )


def updated_server_problems(settings: Settings) -> Iterator[Problem]:
    """Refuse arguments under which servers of the policy may answer by other weights than those of their last update."""
    arguments = settings.section(SglangSection).server_args
    yield from update_problems(arguments, where="sglang.server_args")
    try:
        policies = serving_topology(settings).policies
    except ConfigError:
        return  # which `topology.problems_of` tells
    for group in (group for model in policies for group in model.server_groups):
        where = (
            f"{settings.section(FleetSection).sglang_config}: {group.worker_type} of the policy: overrides"
        )
        yield from update_problems(group.overrides, where=where)


def rank_update_problems(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Refuse updates that ranks of servers receive themselves where GPUs are shared in a way that they cannot serve."""
    transport, cluster = planned_transport(settings), settings.cluster
    where = "train.update_weight_transport"
    if not is_by_ranks(transport, registry):
        return
    if cluster.colocate and not shares_gpus(transport, registry):
        yield Problem(
            where,
            f"{transport} with colocate",
            "cuda-ipc, memory, distributed or disk",
            "NCCL refuses a group of which two members share a GPU",
        )
    is_watched = settings.section(FleetSection).use_fault_tolerance
    if is_watched and both_offload(cluster) and disaggregated_topology(settings) is not None:
        yield Problem(
            where,
            f"{transport} with use_fault_tolerance and prefill and decode engines, where trainer and engine offload",
            "memory, distributed or disk",
            "weights for the only engine of a kind would need the GPU memory of the others, which are at work",
        )


def _key_problems(fleet: FleetSection) -> Iterator[Problem]:
    """Refuse a file that holds no key, and one that nobody asks for."""
    path = fleet.rollout_external_key_file
    if path is None:
        return
    if not fleet.rollout_external_engine_addrs and fleet.sglang_router_ip is None:
        yield Problem(
            "fleet.rollout_external_key_file",
            f"{path}, and nothing that runs already",
            "rollout_external_engine_addrs or sglang_router_ip beside it",
            "servers that the run starts ask for a key that it makes",
        )
    try:
        read_key(path, where="fleet.rollout_external_key_file")
    except ConfigError as error:
        yield from error.problems
