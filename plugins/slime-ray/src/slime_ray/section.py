"""Settings of the launcher `ray`. How many ranks there are is core's section `cluster`."""

from __future__ import annotations

from typing import Literal

from slime_core.config.base import Count, Seconds, SectionModel


class RaySection(SectionModel):
    """Ranks and servers placed by Ray (`--launcher ray`)."""

    address: str | None = None
    """Ray cluster to join: `HOST:PORT` as `ray start --head` prints it, or `auto` for the one of this machine. When not given, the
    one that the environment variable RAY_ADDRESS names; without that one is started on this machine, and ends with the run."""
    device: Literal["gpu", "cpu"] | None = None
    """What ranks and servers compute on. When not given, GPUs where the cluster has some, and otherwise the CPU of a cluster that
    the run starts; one that it joins has to have GPUs."""
    reward_num_nodes: Count | None = None
    """Machines of the cluster that have workers of rewards, `--reward-workers` on each and a core for each of these; when not given,
    they are children of the process that was started."""
    start_timeout_s: Seconds = 600
    """Deadline of the start, seconds: machines that are free, processes, and the model on every rank."""
