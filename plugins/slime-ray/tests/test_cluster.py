"""Joining a cluster, and starting one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from slime_core.cli.memory import device_of
from slime_core.config.load import load_settings
from slime_core.errors import TrainerError
from slime_core.plugins.registry import Registry
from slime_ray.launcher import set_environment


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "Connection refused"), ("nonsense", "invalid literal for int")]
)
def test_address_where_no_cluster_is_is_refused_at_once(monkeypatch, address, why):
    set_environment()
    from slime_ray.placement.cluster import connect  # imports Ray

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(TrainerError, match=f"RAY_ADDRESS: found '{address}', where no .* joined: .*{why}"):
        connect(1)


@pytest.mark.parametrize("times", [1, 2])
def test_a_head_that_answers_late_is_joined_at_the_second_try_and_no_later(monkeypatch, times):
    set_environment()
    from slime_ray.placement import cluster

    calls = []

    def init(**settings):
        calls.append(settings["address"])
        if len(calls) <= times:
            raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(cluster.ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        if times == 1:
            assert cluster.connect(1, address)
        else:
            with pytest.raises(
                TrainerError, match=f"--ray-address: found '{address}', where no Ray cluster can be"
            ):
                cluster.connect(1, address)
    assert calls == [address] * 2


#: Joins a cluster that may want a token, and says what came of it.
JOINS = """
import sys
from slime_ray.launcher import set_environment
set_environment()
from slime_core.errors import TrainerError
from slime_ray.placement.cluster import connect
try:
    connect(1, sys.argv[1])
except TrainerError as error:
    print(error)
"""


def test_a_token_that_a_cluster_wants_and_nobody_gave_is_told(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    environment.pop("RAY_AUTH_TOKEN", None)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        command = [sys.executable, "-c", JOINS, address]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100).stdout
    assert told.startswith(f"--ray-address: found '{address}', where no Ray cluster can be joined: ")
    assert "token" in told


#: Starts a cluster where Ray's start times out so many times, and leaves a process each time.
TIMES_OUT = """
import subprocess, sys, time
from pathlib import Path
from slime_ray.launcher import set_environment
set_environment()
import ray
from slime_ray.placement import cluster

init, left = ray.init, []
def times_out(**settings):
    if len(left) == int(sys.argv[1]):
        return init(**settings)
    daemon = [sys.executable, "-c", "import time; time.sleep(1000)", ray.__path__[0]]
    left.append(subprocess.Popen(daemon))
    while not Path(f"/proc/{left[-1].pid}/cmdline").read_bytes():  # it becomes another program
        time.sleep(0.01)
    raise Exception("The current node timed out during startup.")

ray.init = times_out
try:
    print(cluster.connect(1), ray.is_initialized())
except Exception as error:
    print(type(error).__name__, error)
print(*(process.wait() for process in left))
"""


@pytest.mark.parametrize(
    ("times", "said", "statuses"),
    [
        (1, "True True", [-9]),
        (
            2,
            "TrainerError launcher ray: Ray could not be started on this machine, twice: The current",
            [-9] * 2,
        ),
    ],
)
def test_a_start_of_ray_that_times_out_is_tried_once_more_and_leaves_nothing(times, said, statuses):
    printed = subprocess.run(
        [sys.executable, "-c", TIMES_OUT, str(times)], capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    assert printed[0].startswith(said)
    assert printed[1].split() == [str(status) for status in statuses]


def test_what_the_machines_of_a_cluster_have_is_not_judged_by_this_one(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def memory_bytes(*flags):
        needed = ["--hf-checkpoint", "m", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]
        settings = load_settings(
            [], [*needed, "--launcher", "ray", *flags], registry=Registry.from_environment()
        )
        return device_of(settings, None).memory_bytes

    assert memory_bytes() is not None  # it starts one here
    assert memory_bytes("--ray-address", "local") is not None
    assert memory_bytes("--ray-address", "10.0.0.1:6379") is None
