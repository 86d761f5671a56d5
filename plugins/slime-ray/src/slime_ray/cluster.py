"""The Ray cluster of a run: joined or started, and the places on it where ranks go."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from slime_core.config.sections import ClusterSection
from slime_core.errors import ConfigError, Problem, TrainerError

#: Environment variable that names the cluster to join.
ADDRESS = "RAY_ADDRESS"
#: Seconds in which a cluster's head answers.
_KNOCK_S = 10.0


def connect(n_ranks: int) -> bool:
    """Join the cluster that RAY_ADDRESS names, or start one of this machine alone; returns whether this call did.

    Args:
        n_ranks: ranks for which a cluster that is started has room, however few cores the machine has.

    Raises:
        TrainerError: no cluster answers at that address.
    """
    if ray.is_initialized():
        return False
    with _own_sigterm():
        _connect(n_ranks)
    return True


def _connect(n_ranks: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get(ADDRESS) or "local"
    if address == "local":
        n_cpus = max(n_ranks, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=n_cpus, include_dashboard=False, **quiet)
        return
    try:
        if address != "auto":  # Ray itself knocks for a minute, and says so line by line
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise TrainerError(
            f"{ADDRESS}: found {address!r}, where no Ray cluster can be joined: {error}; wanted HOST:PORT as "
            "`ray start --head` prints it, or no such variable"
        ) from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Leave what this process does on SIGTERM as it is; Ray would have it print stacks and abort."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Places:
    """Room for all ranks: a bundle a machine, reserved on the cluster."""

    group: PlacementGroup
    per_machine: int
    gpus: bool
    """Whether each rank gets a GPU."""

    @classmethod
    def reserve(cls, section: ClusterSection) -> Places:
        """Ask for room on as many machines as the section says; `group.ready()` is when they are free.

        Raises:
            ConfigError: the cluster is too small, whoever else uses it.
        """
        kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        n = section.actor_num_gpus_per_node
        found = sorted(
            (int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), reverse=True
        )
        if sum(number >= n for number in found) < section.actor_num_nodes:
            raise ConfigError(
                [
                    Problem(
                        "cluster.actor_num_nodes x cluster.actor_num_gpus_per_node",
                        f"{section.actor_num_nodes} x {n}, and a Ray cluster whose machines have "
                        f"{', '.join(map(str, found))} {kind}s",
                        f"{section.actor_num_nodes} machines with {n} {kind}s each",
                        f"choose fewer, or join a larger cluster by {ADDRESS}",
                    )
                ]
            )
        bundle = {"CPU": float(n), kind: float(n)}
        group = placement_group([bundle] * section.actor_num_nodes, strategy="STRICT_SPREAD")
        return cls(group, n, kind == "GPU")

    def options(self, number: int) -> dict[str, Any]:
        """Return the options of the actor that is rank `number`; ranks of one machine are in a row."""
        return {
            "num_cpus": 1,
            "num_gpus": int(self.gpus),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=number // self.per_machine
            ),
        }

    def free(self) -> None:
        """Give the room back."""
        remove_placement_group(self.group)
