"""Where launcher `ray` puts ranks and the engine's processes, on clusters with GPUs that are numbers only."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_core.checks.settings import check_settings
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, TrainerError
from slime_core.launch.local import assemble_and, drive
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_build
from slime_core.rundir.records import read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PARTS = (
    *("--train-backend", "letters.placed:create_trainer", "--rollout-engine", "letters.placed:create_engine"),
    *("--launcher", "ray", "--eval-interval", "none", "--num-rollout", "1"),
)


@pytest.fixture
def run(letters: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that trains for a step, and returns what each rank and each process of the engine saw."""
    monkeypatch.syspath_prepend(root / "tests/plugins")

    def run(servers: list[tuple[int, int]], *flags: str) -> tuple[list[dict], list[dict]]:
        from slime_ray.trainer.trainer import OnRay

        monkeypatch.setenv("SERVERS", json.dumps(servers))
        registry = Registry()
        settings = load_settings([str(letters)], [*PARTS, *flags], registry=registry)
        assert (
            asyncio.run(assemble_and(drive, settings, registry, placement=OnRay()))["status"] == "completed"
        )
        return seen(tmp_path / "runs/letters", [first for first, _ in servers])

    return run


def seen(folder: Path, servers: list[int]) -> tuple[list[dict], list[dict]]:
    """What ranks and processes of the engine say of themselves, and that none of them is left."""
    logs = sorted((folder / "ranks").glob("rank_*.log"))
    ranks = [
        json.loads(next(line for line in log.read_text().splitlines() if '"rank"' in line)) for log in logs
    ]
    processes = [json.loads((folder / f"placed/server_{first}.log").read_text()) for first in servers]
    assert [pid for process in processes for pid in process["pids"] if runs(pid)] == []
    return ranks, processes


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ids(processes: list[dict]) -> list[tuple[str, ...]]:
    return [tuple(process["gpus"].split(",")) for process in processes]


@pytest.mark.parametrize(
    ("servers", "flags", "problem"),
    [
        (
            [(0, 4)],
            ("--num-gpus-per-node", "2"),
            "cluster.num_gpus_per_node: found 4 GPUs of one server, with 2 GPUs a machine; wanted at most 2; a process of a "
            "server is on one machine; --rollout-num-gpus-per-engine says how many GPUs a server has",
        ),
        (
            [(0, 2)],
            ("--actor-num-gpus-per-node", "4", "--colocate"),
            "cluster.colocate: found it, 4 GPUs of the trainer and 2 of the engine; wanted as many of both; leave "
            "--rollout-num-gpus out, or drop --colocate",
        ),
    ],
)
def test_what_fits_no_machine_is_found_before_anything_starts(
    letters, root, monkeypatch, servers, flags, problem
):
    monkeypatch.syspath_prepend(root / "tests/plugins")
    monkeypatch.setenv("SERVERS", json.dumps(servers))
    registry = Registry()
    settings = load_settings([str(letters)], [*PARTS, *flags], registry=registry)
    assert check_settings(settings, registry) == []
    with pytest.raises(ConfigError) as caught:
        make_build(settings, registry)
    assert [str(one) for one in caught.value.problems] == [problem]


@pytest.mark.faults
def test_apart_no_gpu_is_given_twice(one_node, run):
    ranks, servers = run([(0, 2), (2, 1), (3, 1)], "--actor-num-gpus-per-node", "4")
    assert [rank["given"] for rank in ranks] == [rank["gpus"] for rank in ranks] == ["0", "1", "2", "3"]
    assert ids(servers) == [("4", "5"), ("6",), ("7",)]
    assert {server["site"][0] for server in servers} == {"127.0.0.1"}  # the driver is on their machine
    ports = [port for server in servers for port in server["site"][1:]]
    assert len(set(ports)) == len(ports) == 9
    assert {server["threads"] for server in servers} == {os.environ.get("OMP_NUM_THREADS")}
    assert {process["nice"] for process in ranks + servers} == {
        os.nice(0)
    }  # Ray would have them yield to all others


@pytest.mark.parametrize(
    ("n_ranks", "servers"),
    [(2, [(0, 2)]), pytest.param(8, [(0, 4), (4, 2), (6, 2)], marks=pytest.mark.faults)],
)
def test_colocated_a_server_has_the_gpus_of_the_ranks(one_node, run, n_ranks, servers):
    ranks, placed = run(servers, "--actor-num-gpus-per-node", str(n_ranks), "--colocate")
    assert [rank["gpus"] for rank in ranks] == [str(number) for number in range(n_ranks)]
    assert ids(placed) == [
        tuple(str(number) for number in range(first, first + count)) for first, count in servers
    ]


def test_more_than_the_cluster_has_is_refused_at_once(one_node, run):
    wanted = r"found 1 x 8 and servers of 1 more, and a Ray cluster whose machines have 8 GPUs with a core for each; wanted "
    wanted += "machines with 8, 1 GPUs"
    with pytest.raises(ConfigError, match=wanted):
        run([(0, 1)], "--actor-num-gpus-per-node", "8")


@pytest.mark.faults
def test_a_rank_that_is_given_a_gpu_does_not_compute_on_the_cpu(one_node, root, tiny_llama, tmp_path):
    from slime_ray.trainer.trainer import OnRay

    registry = Registry.from_environment()
    flags = ["--hf-checkpoint", str(tiny_llama), "--launcher", "ray", "--output-dir", str(tmp_path)]
    settings = load_settings([str(root / "recipes/quickstart.toml")], flags, registry=registry)
    with pytest.raises(
        TrainerError, match=r"rank 0 of 1: found no CUDA device on .*, where it was given GPU 0"
    ):
        asyncio.run(assemble_and(drive, settings, registry, placement=OnRay()))


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two machines with four GPUs each, which are this one under two addresses.

    The first has the address that drivers of this machine look for.
    """
    from slime_ray.launcher import set_environment

    set_environment()
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 5, "num_gpus": 4}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    try:
        cluster.add_node(**size, node_ip_address="127.0.0.2")
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.faults
def test_on_two_nodes_a_server_is_at_the_address_of_its_node(two_nodes, slime, letters, root, tmp_path):
    """Three ranks on each of two machines, and a server of one GPU and a worker of rewards beside each of them."""
    path = os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": path, "SERVERS": "[[0, 1], [1, 1]]"}
    size = ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "3", "--num-gpus-per-node", "4")
    size += ("--ray-reward-num-nodes", "2", "--rm-type", "placed_scores:next_letter", "--reward-key", "score")
    done = slime("train", str(letters), *PARTS, *size, "--ray-address", two_nodes, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks, servers = seen(tmp_path / "runs/letters", [0, 1])
    assert [rank["gpus"] for rank in ranks] == ["0", "1", "2"] * 2
    assert ids(servers) == [("3",), ("3",)]
    hosts = [server["site"][0] for server in servers]
    assert sorted(hosts) == ["127.0.0.1", "127.0.0.2"]  # which of them has rank 0 is Ray's choice
    scored = read_records(tmp_path / "runs/letters/rollouts/step_000001.jsonl")
    assert len({one["reward"]["node"] for one in scored} - {""}) == 2


@pytest.mark.faults
def test_a_driver_in_a_job_runs_where_its_cluster_and_folder_are(two_nodes, letters, root, tmp_path):
    """As `ray job submit` starts it: no terminal, no GPU, another folder, and the cluster by the environment alone."""
    recipe = letters.rename(tmp_path / "model/letters.toml")
    job = {"runtime_env": {"env_vars": {"OF_THE_JOB": "1"}}, "metadata": {"job_submission_id": "raysubmit_1"}}
    env = os.environ | {
        "PYTHONPATH": str(root / "tests/plugins"),
        "SERVERS": "[[0, 1]]",
        "RAY_ADDRESS": two_nodes,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "slime_core", "train", recipe.name, *PARTS, "--output-dir", "here"]
    done = subprocess.run(
        command, env=env, cwd=recipe.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ranks, servers = seen(recipe.parent / "here/letters", [0])
    assert [rank["gpus"] for rank in ranks] == ["0"]
    assert ids(servers) == [("1",)]
    assert [each["job"] for each in ranks + servers] == ["1", "1"]  # they have the job's runtime environment


@pytest.mark.faults
@pytest.mark.parametrize("joins", [False, True])
def test_servers_go_with_a_driver_that_is_killed(request, letters, root, tmp_path, joins):
    """On a cluster that it started itself, and on one that goes on."""
    path = os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": path, "SERVERS": "[[0, 1]]"}
    if joins:
        env["RAY_ADDRESS"] = request.getfixturevalue("two_nodes")
    command = [sys.executable, "-m", "slime_core", "train", str(letters), *PARTS, "--num-rollout", "50000"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "runs/letters/metrics.jsonl"
    try:
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    pids = json.loads((tmp_path / "runs/letters/placed/server_0.log").read_text())["pids"]
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
