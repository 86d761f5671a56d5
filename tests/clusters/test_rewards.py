"""Workers of rewards on machines of a Ray cluster: each machine has some, one that is lost comes again, and the run is the same."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry
from slime_core.samples.sample import Sample

from ..runs.asynchronous.test_async_loops import rows, samples
from ..servers.attacked import Runs, writers_below

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two machines with two cores each, which are this one under two addresses."""
    from slime_ray.launcher import set_environment

    set_environment()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
        yield cluster.address
    finally:
        cluster.shutdown()


def flags(address: str, *more: str) -> list[str]:
    ray = ["--launcher", "ray", "--ray-address", address, "--ray-device", "cpu"]
    return [*ray, "--ray-reward-num-nodes", "2", "--reward-workers", "1", *more]


LOOKS = ["--rm-type", "placed_scores:next_letter", "--reward-key", "score"]


def alike(folder: Path) -> list[dict[str, Any]]:
    """The samples, but for where they were scored."""
    return [one | {"reward": one["reward"]["score"]} for one in samples(folder)]


def test_rewards_are_scored_on_both_machines_also_when_the_actor_of_one_is_killed(
    two_nodes, letters, root, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(root / "tests/plugins")
    slow = [*LOOKS, "--rollout-engine", "letters.slow:create_engine"]
    registry = Registry()
    settings = load_settings([str(letters)], [*slow, "--run-name", "whole"], registry=registry)
    assert launch(settings, registry, drive)["status"] == "completed"
    gate, later, hook = tmp_path / "gate", tmp_path / "later", "sample_hooks:WaitsForFile"
    files = {"file": str(gate), "later": str(later)}
    waits = ["--rollout-sample-hook-path", hook, "--hook-args", json.dumps({hook: files})]
    command = [sys.executable, "-m", "slime_core", "train", str(letters), *flags(two_nodes, *slow, *waits)]
    runs = Runs(command, tmp_path / "runs/letters", root)
    metrics = runs.folder / "metrics.jsonl"
    with runs.attacked() as run:
        run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5)  # step 5: at the gate
        hosts = [pid for pid, title in writers_below(runs.folder) if title.startswith("ray::RewardHost")]
        assert len(hosts) == 2
        os.kill(hosts[0], signal.SIGKILL)
        gate.touch()  # the next calls find it lost
        run.wait_for(lambda: "is back" in run.told)
        later.touch()
        assert run.finish() == 0, run.told
    whole = tmp_path / "runs/whole"
    assert rows(runs.folder) == rows(whole)
    assert alike(runs.folder) == alike(whole)
    nodes = [
        {one["reward"]["node"] for one in samples(runs.folder) if one["step"] == step} for step in (1, 12)
    ]
    assert len(nodes[0]) == len(nodes[1]) == 2  # the first step, and the last
    assert {one["reward"]["node"] for one in samples(whole)} == {""}
    assert writers_below(tmp_path) == []


def test_a_reward_that_does_not_import_there_ends_the_run_by_name(two_nodes, slime, letters, root):
    reward = ("--rm-type", "placed_scores_at_home:next_letter")
    env = os.environ | {"PYTHONPATH": str(root / "tests/plugins")}
    done = slime("train", str(letters), *flags(two_nodes, *reward), env=env)
    assert done.returncode == 2, done.stderr
    assert "PluginError\n  reward placed_scores_at_home:next_letter: does not import: " in done.stderr
    assert "raised on reward host 0 of 2" in done.stderr


def test_calls_of_machines_that_are_lost_go_to_another_one_at_once_and_fail_where_none_is_left(
    root, tmp_path, monkeypatch
):
    """Neither machine has a place elsewhere in the cluster: what is lost with one never comes back."""
    import ray
    from ray.cluster_utils import Cluster
    from slime_core.rewards.workers.wire import Setup
    from slime_ray.launcher import set_environment
    from slime_ray.rewards import RayRewardWorkers

    (tmp_path / "slow_scores.py").write_text(
        "import time\n\n\ndef score(sample):\n    time.sleep(0.5)\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    set_environment()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [
        cluster.add_node(num_cpus=1, resources={name: 1}, node_ip_address=f"127.0.0.{last}")
        for last, name in ((2, "first"), (3, "second"))
    ]
    ray.init(address=cluster.address, log_to_driver=False)
    workers = RayRewardWorkers(
        Setup(
            reference="slow_scores:score",
            options={},
            timeout_s=60.0,
            start_timeout_s=300.0,
            memory_bytes=None,
        ),
        size=1,
        lock=list,
        options=[{"resources": {name: 1}} for name in ("first", "second")],
        log=lambda number: tmp_path / f"rewards_{number}.log",
        timeout_s=300.0,
        watch=lambda pids: None,
    )

    def hosts() -> set[int]:
        return {pid for pid, title in writers_below(tmp_path) if title.startswith("ray::RewardHost")}

    async def lose_both() -> tuple[list[Any], list[Any]]:
        assert not await workers.start()
        sample = pickle.dumps(Sample(index=0, prompt="a"))
        await workers.answer(sample)  # their workers have imported the reward
        killed = hosts()
        for pid in killed:  # while nobody asks them, so that nobody is told
            os.kill(pid, signal.SIGKILL)
        while len(hosts() - killed) < 2:
            await asyncio.sleep(0.1)
        assert len(await asyncio.gather(*(workers.answer(sample) for _ in range(4)))) == 4
        asked = [asyncio.ensure_future(workers.answer(sample)) for _ in range(16)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(cluster.remove_node, nodes[0])
        one_left = await asyncio.gather(*asked)
        workers._timeout_s = 2.0
        await asyncio.to_thread(cluster.remove_node, nodes[1])
        none_left = await asyncio.gather(*(workers.answer(sample) for _ in range(4)))
        await workers.close()
        return one_left, none_left

    try:
        one_left, none_left = asyncio.run(asyncio.wait_for(lose_both(), 900))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [answer["outcomes"] for answer in one_left] == [[{"value": 1.0}]] * 16
    assert {answer.kind for answer in none_left} == {"crashed"}
    assert {answer.what for answer in none_left} == {
        "was lost with all of its machines (none was back after 2 s, --ray-start-timeout-s)"
    }
