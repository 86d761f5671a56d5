"""Ranks and real SGLang servers, all of them placed by launcher `ray`: the run is that of launcher `local`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..servers.attacked import writers_below
from ..servers.whole_runs import check_whole, metrics, samples

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]


def finish(command: list[str], *flags: str) -> None:
    """Run a command to its end."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run([*command, *flags], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


#: How two ranks share the work: samples, each layer, or the layers; and how one of them sends the weights.
LAYOUTS = {
    "dp2": ["--update-weight-transport", "disk"],
    "tp2": [
        *("--tensor-model-parallel-size", "2"),
        *("--update-weight-transport", "distributed", "--update-weight-mode", "delta"),
    ],
    "pp2": ["--pipeline-model-parallel-size", "2", "--update-weight-transport", "nccl"],
}


def test_two_ranks_and_two_servers_learn_what_one_rank_learns_with_two_servers(sglang_run, tmp_path):
    """One request at a time is drawn from the random numbers of a server, the same ones in each run.

    At the first optimizer step of a batch the loss is 0, as advantages of a group add up to 0; at the second it is not.
    """
    local = tmp_path / "runs/local"
    sglang_run += ["--rollout-num-gpus", "2", "--rollout-concurrency", "1", "--num-steps-per-rollout", "2"]
    finish(sglang_run, "--run-name", "local")
    check_whole(local)
    assert all(abs(row["train/loss"]) > 1e-3 for row in metrics(local)[1:])
    ranks = ("--launcher", "ray", "--actor-num-gpus-per-node", "2")
    for layout, flags in LAYOUTS.items():
        finish(sglang_run, "--run-name", layout, *ranks, *flags)
        check_same(tmp_path / "runs" / layout, local)


def test_two_ranks_send_an_update_again_during_which_a_server_is_lost(
    sglang_run, tmp_path, root, monkeypatch
):
    """A call of the ranks that failed would end them: they come to the end of the update that broke off."""
    monkeypatch.setenv("PYTHONPATH", str(root / "tests/plugins"))
    ranks = ("--launcher", "ray", "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    servers = ("--rollout-num-gpus", "2", "--update-weight-transport", "nccl", "--use-fault-tolerance")
    trouble = ("--tracker", "jsonl", "trouble_in_serving:create_stopper")
    checks = ("--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "30")
    finish(sglang_run, *ranks, *servers, *trouble, *checks)
    run = tmp_path / "runs/letters"
    check_whole(run)
    log = (run / "log.txt").read_text()
    lost = r"update to version 2: engine 0 \(.+\) was lost during it; sending it again"
    assert re.search(lost, log, re.S)
    assert "it failed its health check" in log
    assert writers_below(run) == []


def check_same(placed: Path, local: Path) -> None:
    """Check that a run on Ray drew the tokens of another, and learned the same from them."""
    check_whole(placed)
    for step in range(1, 5):
        drawn = [[each["tokens"] for each in samples(run, step)] for run in (placed, local)]
        assert drawn[0] == drawn[1], placed.name
    for row, wanted in zip(metrics(placed)[1:], metrics(local)[1:], strict=True):  # an evaluation comes first
        for name in ("train/loss", "train/grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5)
    assert (placed / "ranks/machine_000.log").is_file()  # which started the servers
    assert writers_below(placed) == []


#: Address of a machine besides the first, which is this one.
OTHER = "127.0.0.2"
#: Runs a command among processes of its own, as on another machine: it sees no others, nor what they have open.
ELSEWHERE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture
def two_machines() -> Iterator[str]:
    """The address of a cluster of two machines with one core each, whose processes do not see one another."""
    from slime_ray.launcher import set_environment

    set_environment()
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1})
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
    ray_start += ["--address", cluster.address, "--node-ip-address", OTHER]
    other = subprocess.Popen([*ELSEWHERE, *ray_start], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while sum(node["Alive"] for node in ray.nodes()) < 2:
            if other.poll() is not None:  # Ray gives a machine up that is not there after 30 s, busy or not
                other = subprocess.Popen([*ELSEWHERE, *ray_start], stdout=subprocess.DEVNULL)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ray.shutdown()
        yield cluster.address
    finally:
        ray.shutdown()
        other.kill()
        other.wait()
        cluster.shutdown()


def test_servers_that_share_devices_with_ranks_on_two_machines_get_their_weights_there(
    two_machines, sglang_run, tmp_path
):
    """By memory that a server of the other machine could not open. Nothing is asked for: it is the default there."""
    sglang_run += ["--launcher", "ray", "--ray-address", two_machines, "--ray-device", "cpu", "--colocate"]
    sglang_run += ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"]
    finish(sglang_run)
    run = tmp_path / "runs/letters"
    check_whole(run)
    hosts = [set(re.findall(r"'host': '([^']+)'", log.read_text())) for log in (run / "sglang").iterdir()]
    assert sorted(hosts, key=sorted) == [{"127.0.0.1"}, {OTHER}]
    assert writers_below(run) == []


def test_a_server_on_another_machine_than_the_rank_gets_its_weights_by_nccl_where_nothing_is_asked_for(
    two_machines, sglang_run, tmp_path
):
    finish([*sglang_run, "--launcher", "ray", "--ray-address", two_machines, "--ray-device", "cpu"])
    run = tmp_path / "runs/letters"
    check_whole(run)
    assert "machine_001.log" in {
        log.name for log in (run / "ranks").iterdir()
    }  # which started the server, alone there
    assert "transport nccl" in (run / "log.txt").read_text()
    assert writers_below(run) == []


def test_a_server_whose_ranks_are_on_two_machines_serves_what_ranks_there_learn(
    two_machines, sglang_run, tmp_path
):
    """They meet at an address that both machines reach, which 127.0.0.1 of the driver's machine is not."""
    sglang_run += ["--launcher", "ray", "--ray-address", two_machines, "--ray-device", "cpu", "--colocate"]
    sglang_run += ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"]
    host = two_machines.partition(":")[0]
    finish([*sglang_run, "--rollout-num-gpus-per-engine", "2"])
    run = tmp_path / "runs/letters"
    check_whole(run)
    said = [(run / "sglang" / name).read_text() for name in ("server.log", "server-node-1.log")]
    listen, meet = (
        [re.search(rf"'{name}': '([^']+)'", log)[1] for log in said] for name in ("host", "dist_init_addr")
    )
    assert listen[0] in {host, OTHER}
    assert listen[1] in {"127.0.0.1", OTHER} - {listen[0]}
    assert {address.partition(":")[0] for address in meet} == {listen[0]}
    assert writers_below(run) == []


def test_a_prompt_is_computed_on_one_machine_and_its_answer_on_the_other(two_machines, sglang_run, tmp_path):
    sglang_run += ["--launcher", "ray", "--ray-address", two_machines, "--ray-device", "cpu", "--colocate"]
    sglang_run += ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--prefill-num-servers", "1"]
    host = two_machines.partition(":")[0]
    finish(sglang_run)
    run = tmp_path / "runs/letters"
    check_whole(run)
    listen = [re.search(r"'host': '([^']+)'", log.read_text())[1] for log in (run / "sglang").iterdir()]
    assert sorted(listen) == sorted([host, OTHER])
    assert writers_below(run) == []
