"""Whether a cluster has room for a run, before it is asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from slime_core.errors import ConfigError, Problem

from slime_ray.placement.plan import DevicePlan, Needs


def has_gpus(device: str | None, *, is_joined: bool) -> bool:
    """Return whether processes get GPUs of the cluster, and not the CPU.

    Args:
        device: `ray.device`.
        is_joined: whether the cluster was there before the run.

    Raises:
        ConfigError: it has none, and nobody asked for the CPU.
    """
    if device == "cpu":
        return False
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray leaves it so
    if resources.get("GPU"):
        return True
    if device is None and not is_joined:
        return False
    wanted = "a cluster with GPUs"
    raise ConfigError(
        [
            Problem(
                "ray.device", "a Ray cluster that has no GPUs", wanted, "give --ray-device cpu to do without"
            )
        ]
    )


def sizes(nodes: Sequence[Mapping[str, Any]], kind: str) -> list[int]:
    """Return how many GPUs, or CPUs, the machines of a cluster have, the most first. A core goes with each GPU."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    return sorted((int(min(own.get(kind, 0), own.get("CPU", 0))) for own in resources), reverse=True)


def check_reward_room(
    n_hosts: int, cores: int, nodes: Sequence[Mapping[str, Any]], *, taken: Sequence[int]
) -> None:
    """Refuse more machines for workers of rewards than a cluster has that are large enough.

    Args:
        n_hosts: how many machines.
        cores: of each.
        nodes: of the cluster, as Ray tells them.
        taken: cores that the run's other processes take of each of their machines.
    """
    found = sizes(nodes, "CPU")
    n_shared = max(0, n_hosts - (len(found) - len(taken)))  # so many at least are beside others of the run
    shared = sorted((cores + number for number in sorted(taken)[:n_shared]), reverse=True)
    are_too_small = any(one < wanted for one, wanted in zip(found, shared, strict=False))
    if sum(one >= cores for one in found) < n_hosts or are_too_small:
        raise ConfigError(
            [
                Problem(
                    "ray.reward_num_nodes x reward.reward_workers",
                    f"{n_hosts} x {cores}, and a Ray cluster whose machines have {', '.join(map(str, found))} CPUs, of which ranks "
                    f"and servers take {', '.join(map(str, taken))}",
                    f"{n_hosts} machines with {cores} CPUs",
                    "choose fewer, or join a larger cluster by --ray-address",
                )
            ]
        )


def check_room(needs: Needs, plan: DevicePlan, found: Sequence[int], kind: str) -> None:
    """Refuse a plan that a cluster has no machines for; `found` are the sizes of those that it has, the largest first."""
    wanted = sorted(plan.gpus, reverse=True)
    if len(found) >= len(wanted) and all(one >= number for one, number in zip(found, wanted, strict=False)):
        return
    pools = "".join(
        f", {role} ranks of {machines} x {each}" for role, (machines, each) in needs.pools.items()
    )
    servers = (
        f" and servers of {needs.engine.total} more" if needs.engine.total and not needs.colocate else ""
    )
    raise ConfigError(
        [
            Problem(
                "cluster.actor_num_nodes x cluster.actor_num_gpus_per_node",
                f"{needs.num_nodes} x {needs.ranks_per_node}{pools}{servers}, and a Ray cluster whose machines have "
                f"{', '.join(map(str, found))} {kind}s{' with a core for each' if kind == 'GPU' else ''}",
                f"machines with {', '.join(map(str, wanted))} {kind}s",
                "choose fewer, or join a larger cluster by --ray-address",
            )
        ]
    )
