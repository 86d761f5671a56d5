"""`ray job`, as the README of slime-ray has it, with a real cluster with a dashboard, whose machines have GPUs that are numbers only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from slime_core.runtime.processes.ports import ReservedPort

from .test_placement import PARTS, ids, seen

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]

Job = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Address of the dashboard of a cluster of one machine with four GPUs."""
    from slime_ray.launcher import set_environment

    set_environment()
    from ray.cluster_utils import Cluster

    with ReservedPort() as port, ReservedPort() as agent:
        head = {
            "include_dashboard": True,
            "dashboard_port": port.number,
            "dashboard_agent_listen_port": agent.number,
        }
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 5, "num_gpus": 4, **head})
        try:
            yield f"http://127.0.0.1:{port.number}"
        finally:
            cluster.shutdown()


@pytest.fixture
def submit(ray_job: Job, root: Path, tmp_path: Path) -> Job:
    """Returns a function that submits `slime train` as a job with the tabular trainer, and waits for its end."""
    env_vars = {"PYTHONPATH": str(root / "tests/plugins"), "SERVERS": "[[0, 2]]", "OF_THE_JOB": "1"}
    env_vars["RAY_JOB_STOP_WAIT_TIME_S"] = "600"  # else Ray kills it after 3 s

    def submit(*words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        train = [sys.executable, "-m", "slime_core", "train", *words, "--output-dir", str(tmp_path / "here")]
        return ray_job(
            "submit", "--runtime-env-json", json.dumps({"env_vars": env_vars}), *options, "--", *train
        )

    return submit


@pytest.fixture
def ray_job(dashboard: str, tmp_path: Path) -> Job:
    """Returns a function that runs `ray job`, as from a machine that is none of the cluster's."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}

    def ray_job(what: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("ray")), "job", what, "--address", dashboard, *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    return ray_job


def test_a_job_trains_on_the_cluster_that_it_was_submitted_to(submit, letters, tmp_path):
    done = submit(str(letters), *PARTS, "--actor-num-gpus-per-node", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout + done.stderr
    ranks, servers = seen(tmp_path / "here/letters", [0])
    assert [rank["gpus"] for rank in ranks] == ["0", "1"]
    assert ids(servers) == [("2", "3")]
    assert [each["job"] for each in ranks + servers] == ["1"] * 3


def test_a_job_that_is_refused_fails_by_its_message(submit, letters, tmp_path):
    done = submit(str(letters), *PARTS, "--actor-num-gpus-per-node", "8")
    assert done.returncode == 1
    assert "found 1 x 8" in done.stdout
    assert not (tmp_path / "here/letters/checkpoints").exists()


def test_a_job_that_is_stopped_saves_and_leaves_nothing(submit, ray_job, letters, tmp_path):
    flags = (*PARTS, "--num-rollout", "100000", "--actor-num-gpus-per-node", "1")
    begun = submit(str(letters), *flags, options=("--no-wait", "--submission-id", "stopped"))
    assert begun.returncode == 0, begun.stdout + begun.stderr
    folder, deadline = tmp_path / "here/letters", time.monotonic() + 300
    while not (folder / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, ray_job("logs", "stopped").stdout
        time.sleep(0.1)
    stopped = ray_job("stop", "stopped")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "was stopped" in ray_job("status", "stopped").stdout
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (folder / f"checkpoints/step_{summary['steps']:06d}").is_dir()
    seen(folder, [0])
