"""`ServerSettings`: what one engine and its server are made from. Imports neither torch nor sglang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.config.sections import ClusterSection
from slime_core.config.settings import Settings
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry
from slime_core.protocols import Place
from slime_core.weights.sync import wanted_transport
from slime_models.groups import TRANSPORTS

from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.topology import Role


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One server: what it serves, on what, and what the run needs of it."""

    model_path: Path
    """Hugging Face folder."""
    dtype: str
    """Storage and compute dtype, as torch spells it."""
    section: SglangSection
    """The engines' settings: deadlines, retries, and arguments of all servers."""
    folder: Path
    """For the log, the file that lists the Prometheus endpoint, and answers to weight updates."""
    name: str = "server"
    """Of the server, and so of its log and of its Prometheus endpoint."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's own arguments by name, over those of `section`."""
    address: str | None = None
    """`host:port` of a server that runs already and is joined; None starts one."""
    places: Sequence[Place] = ()
    """Where the launcher starts its processes, one on each machine; none for a child of this process, with the GPUs that `arguments` name."""
    crosses_hosts: bool = True
    """Whether weight updates reach a server on another host."""
    key: str | None = None
    """API key that the server asks for. None makes one for a server that is started, and none for one that is joined."""
    n_ranks: int = 1
    """Ranks of the server, of all pipeline stages."""
    n_ranks_in_all: int | None = None
    """Ranks of all servers that the run starts on this host; None where there is no other."""
    role: Role = "regular"
    """Whether the engine prefills, decodes, or does both."""
    releases_memory: bool = False
    """Whether it gives up its GPUs' memory while the trainer works."""
    returns_routed_experts: bool = False
    """Whether completions must say which experts each token was routed to."""
    keeps_cache: bool = False
    """Whether requests in flight keep their KV cache at a weight update, instead of recomputing it."""
    why_not_on_cpu: str | None = None
    """Why it cannot compute on a CPU, by the model's family; None where it can."""
    is_updated: bool = True
    """Whether the run sends weights; where it does not, a server that is joined must have the right ones."""
    health_timeout_s: float | None = None
    """Deadline of the health checks that a server that is started answers, seconds; None where nobody checks it."""


def both_offload(cluster: ClusterSection) -> bool:
    """Return whether trainer and engine share GPUs in turn, so that the trainer's weights are off them while the engine generates."""
    return cluster.offloads_train and cluster.offloads_rollout


def transport_between_machines(settings: Settings) -> str:
    """Return the transport by which weights reach servers on several machines, for runs that ask for none: `cuda-ipc` where these have the
    trainer's GPUs, else `nccl`.
    """
    return "cuda-ipc" if settings.cluster.colocate else "nccl"


def planned_transport(settings: Settings) -> str:
    """Return the transport of a run's weights: the one asked for, else the default, as far as settings say where servers are."""
    cluster = settings.cluster
    on_several = cluster.colocate and cluster.actor_num_nodes > 1
    return wanted_transport(settings.train) or (
        transport_between_machines(settings) if on_several else "memory"
    )


def crosses_hosts(transport: str, registry: Registry, *, host: str | None, is_placed: bool = False) -> bool:
    """Return whether updates by a transport reach servers on other hosts; of one that is not there others tell.

    Args:
        transport: its name.
        registry: the installed plugins.
        host: address of this machine at which the ranks of servers meet the trainer, if they do; None for one that they reach.
        is_placed: whether a launcher places the servers, as it does the ranks of the trainer, so that one of these may be there.
    """
    try:
        found = registry.resolve(TRANSPORTS.name, transport)
    except PluginError:
        return True
    reaches = found.crosses_hosts or (is_placed and found.senders == "each_machine")
    return bool(reaches) and not (found.by_ranks and host is not None and host.startswith("127."))
