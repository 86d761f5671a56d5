"""The Ray cluster of a run: joining or starting it, and the placement group of the ranks."""

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
#: Signals of a terminal to all that were started from it, which are this process's to heed; Ray leaves out SIGINT by itself.
_TERMINAL = {signal.SIGHUP, signal.SIGQUIT}


def connect(n_ranks: int) -> bool:
    """Join the cluster that RAY_ADDRESS names, or start one of this machine alone; returns whether this call did.

    Args:
        n_ranks: ranks for which a cluster that is started has room, however few cores the machine has.

    Raises:
        TrainerError: no cluster answers at that address, or none could be started.
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
        try:
            with _terminal_unheard():
                ray.init(address="local", num_cpus=n_cpus, include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises classes of all kinds here, Exception itself among them
            raise TrainerError(
                f"launcher ray: Ray could not be started on this machine: {error}; wanted a machine that is less busy, "
                f"or {ADDRESS} of a cluster that is up; Ray's own logs are in /tmp/ray/session_latest/logs"
            ) from error
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


@contextlib.contextmanager
def _terminal_unheard() -> Iterator[None]:
    """Have processes that are started in the block never hear signals of the terminal: this one ends them in its time."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class Placement:
    """The placement group of all ranks: one bundle for each machine."""

    group: PlacementGroup
    per_machine: int
    gpus: bool
    """Whether each rank gets a GPU."""

    @classmethod
    def reserve(cls, section: ClusterSection) -> Placement:
        """Ask for room on as many machines as the section says; `group.ready()` is when they are free.

        Raises:
            ConfigError: the cluster is too small, whoever else uses it.
        """
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray leaves it so
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # as above
        kind = "GPU" if resources.get("GPU") else "CPU"
        n = section.actor_num_gpus_per_node
        found = sorted((int(node["Resources"].get(kind, 0)) for node in nodes if node["Alive"]), reverse=True)
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

    def release(self) -> None:
        """Release the placement group."""
        remove_placement_group(self.group)
