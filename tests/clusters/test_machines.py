"""A machine of a run under Ray is lost: the run ends by the name of its rank, and goes on with another machine; a server's is done without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry

from ..servers.attacked import Runs, writers_below
from ..servers.whole_runs import check_whole
from .test_attacks import metrics

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]

#: Addresses of machines besides the first, which are this one.
SECOND, THIRD = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of a machine with two cores and one with one core."""
    from slime_ray.launcher import set_environment

    set_environment()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=1, node_ip_address=SECOND)
        yield cluster
    finally:
        cluster.shutdown()


def processes_of(node: Any) -> list[int]:
    """The processes of a machine: those that Ray started as it, and all below them."""
    found = [each.process.pid for kind in node.all_processes.values() for each in kind]
    for pid in found:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


@contextlib.contextmanager
def lost(cluster: Any, number: signal.Signals) -> Iterator[None]:
    """Send a signal to all processes of the second machine; after the block none of it is left."""
    (node,) = cluster.worker_nodes
    pids = processes_of(node)
    send(pids, number)
    try:
        yield
    finally:
        held = [descriptor for pid in pids for descriptor in opened(pid)]
        send(pids, signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
        for descriptor in held:  # files of a process are closed when it has ended, and not when it was killed
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(30_000), "a process outlived SIGKILL by 30 s"
            os.close(descriptor)


def opened(pid: int) -> list[int]:
    """What tells the end of a process; nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        return [os.pidfd_open(pid)]
    return []


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def halting(where: str, halted: Path) -> list[str]:
    """Flags by which ranks take some seconds at a place (`slow_parts`), and make a file before."""
    return ["--train-env-vars", json.dumps({"HALT": where, "HALTED": str(halted)})]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_that_loses_the_machine_of_a_rank_names_it_and_goes_on_with_another(
    cluster, letters, root, tmp_path, number
):
    """Killed, a machine resets its connections; stopped, it says nothing, as one without power."""
    command = [sys.executable, "-m", "slime_core", "train", str(letters), "--launcher", "ray"]
    command += ["--ray-address", cluster.address, "--ray-device", "cpu", "--save-interval", "1"]
    command += ["--train-backend", "letters.ranked:create_trainer", "--actor-num-nodes", "2"]
    runs, halted = Runs(command, tmp_path / "runs/letters", root), tmp_path / "halted-in-a-rank"
    with runs.attacked(*halting("train 6", halted)) as run:
        run.wait_for(halted.exists)
        with lost(cluster, number):
            assert run.finish() == 1, run.told
    assert "slime train: RankDied\n  rank " in run.told
    assert f" on {SECOND}) died during train" in run.told
    assert (runs.summary["status"], runs.summary["steps"]) == ("failed", 5)
    assert writers_below(tmp_path) == []

    cluster.add_node(num_cpus=1, node_ip_address=THIRD)
    with runs.attacked() as run:
        assert run.finish() == 0, run.told
    assert runs.summary["status"] == "completed"
    assert f" on {THIRD})" not in run.told
    registry = Registry()
    settings = load_settings([str(letters)], ["--run-name", "whole"], registry=registry)
    assert launch(settings, registry, drive)["status"] == "completed"
    assert metrics(runs.folder) == metrics(tmp_path / "runs/whole")


def test_a_run_that_loses_the_machine_of_a_server_goes_on_with_the_other_server(
    cluster, sglang_run, root, tmp_path
):
    """The first machine has the rank and a server: the second has no room for both."""
    sglang_run += ["--launcher", "ray", "--ray-address", cluster.address, "--ray-device", "cpu"]
    sglang_run += ["--rollout-num-gpus", "2", "--update-weight-transport", "disk", "--use-fault-tolerance"]
    sglang_run += ["--rollout-concurrency", "8", "--sglang-server-concurrency", "4"]
    sglang_run += ["--custom-megatron-before-train-step-hook-path", "slow_parts:before_train_step"]
    runs, halted = Runs(sglang_run, tmp_path / "runs/letters", root), tmp_path / "halted-in-a-rank"
    with runs.attacked(*halting("train 2", halted)) as run:
        run.wait_for(halted.exists, 600)
        with lost(cluster, signal.SIGKILL):
            assert run.finish(600) == 0, run.told
    check_whole(runs.folder)
    assert re.search(
        f"engine 1 is lost, with .* the SGLang server on {SECOND} is lost: the machine {SECOND}", runs.log
    )
    assert writers_below(tmp_path) == []
