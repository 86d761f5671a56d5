"""Any process of a run under Ray is killed, at any time: the run goes on, or ends by name and is gone on from."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry

from ..runs.test_async_loops import accounted, rows, samples
from .attacked import Attacked, Runs, Traces, title_of, writers_below

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

#: How many processes are killed in each of two runs; SLIME_TEST_KILLS has it be more, or fewer.
KILLS = int(os.environ.get("SLIME_TEST_KILLS", "25"))
#: Enough that there are some left after the last.
STEPS = 15 * KILLS
#: One kill of so many comes while the run starts.
STARTS = 6
#: A second machine, which is this one.
SECOND = "127.0.0.2"
FLAGS = [
    *("--rollout-engine", "served_letters:create_engine", "--loop", "one-step-off", "--lr", "1.0"),
    *("--save-interval", "1", "--num-rollout", str(STEPS)),
]
#: A run that ended by itself says why; of one that was killed, or ended by Ray, its guard does.
TOLD = re.compile(r"^slime( train)?: \w", re.MULTILINE)


class Chaos:
    """Kills processes of a run, and starts it again where it ended.

    Args:
        runs: how it is started.
        others: returns processes of the cluster that are killed, too.
        again: called before a start.
    """

    def __init__(self, runs: Runs, others: Callable[[], list[int]], again: Callable[[], None]) -> None:
        self.killed, self.traces = Counter[str](), Traces()
        self._runs, self._others, self._again = runs, others, again
        self._metrics, self._draw = runs.folder / "metrics.jsonl", random.Random("chaos")

    def rage(self, count: int) -> None:
        """Kill so many processes; the run has steps left then."""
        while self.killed.total() < count:
            self._again()
            with self._runs.attacked() as run:
                last = set[str]()
                while self.killed.total() < count and (title := self._kill_one(run)):
                    self.killed[title] += 1
                    last.add(title)
                if self.killed.total() < count:
                    status = run.finish()
                    assert len(rows(self._runs.folder)) <= STEPS, "it was through before so many were killed"
                    untold = (
                        "driver" in last or "guard" in last
                    )  # whom nobody can ask, and who would have told
                    assert status == 0 or untold or TOLD.search(run.told), (status, last, run.told)

    def _kill_one(self, run: Attacked) -> str:
        """Kill a process of the run, some time after its next step or while it starts; returns who it was, empty if it ended before."""
        if self._draw.randrange(STARTS):
            before, deadline = self._steps(), time.monotonic() + 300
            while self._steps() == before:
                if run.process.poll() is not None:
                    return ""
                assert time.monotonic() < deadline, run.told
                time.sleep(0.02)
        until = time.monotonic() + self._draw.uniform(0, 1)
        while time.monotonic() < until and run.process.poll() is None:
            time.sleep(0.02)
        found = {pid: title for pid, title in run.living().items() if title} | dict(
            writers_below(self._runs.folder)
        )
        self.traces.take(found)
        found |= {pid: title for pid in self._others() if (title := title_of(pid))}
        if run.process.poll() is not None or not found:
            return ""
        pid = self._draw.choice(sorted(found))
        os.kill(pid, signal.SIGKILL)
        return kind_of(found[pid], is_driver=pid == run.process.pid)

    def _steps(self) -> int:
        return self._metrics.read_text().count("\n") if self._metrics.exists() else 0


#: Who a process is, by what stands in its command line.
KINDS = {
    "slime_ray/guard.py": "guard", "ray::RankProcess": "rank", "ray::Machine": "machine's actor", "served_letters.py": "server",
    "workers import for": "reward worker", "gcs_server": "Ray's head", "raylet/raylet": "raylet", "log_monitor": "Ray's log monitor",
    "autoscaler": "Ray's autoscaler", "agent": "Ray's agent", "RuntimeEnvAgent": "Ray's agent", "dashboard.py": "Ray's dashboard", "IFS= read": "what ends a server's helpers", "ray::IDLE": "idle worker of Ray",
}  # fmt: skip


def kind_of(title: str, *, is_driver: bool) -> str:
    if is_driver:
        return "driver"
    return next((kind for part, kind in KINDS.items() if part in title), title[:120])


def without_ranks(folder: Path) -> list[dict[str, float]]:
    """The metrics that are the same with one rank and with two."""
    return [{key: value for key, value in row.items() if key != "train/ranks"} for row in rows(folder)]


@pytest.fixture
def whole(letters: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the run that nobody kills, in one process."""
    monkeypatch.syspath_prepend(root / "tests/plugins")
    registry = Registry()
    settings = load_settings([str(letters)], [*FLAGS, "--run-name", "whole"], registry=registry)
    assert launch(settings, registry, drive)["status"] == "completed"
    monkeypatch.setenv("SERVERS", "2")
    return tmp_path / "runs/whole"


@pytest.fixture
def command(letters: Path) -> list[str]:
    words = [sys.executable, "-m", "slime_core", "train", str(letters), *FLAGS, "--launcher", "ray"]
    return [*words, "--train-backend", "ranked_letters:create_trainer"]


def check_learned(chaos: Chaos, runs: Runs, whole: Path, tmp_path: Path) -> None:
    """Check that the run, gone on with, is the one that nobody killed, and that nothing is left of all its lives."""
    with runs.attacked() as run:
        assert run.finish() == 0, run.told
    found = accounted(runs.folder)
    assert set(found) == set(range(max(found) + 1))
    assert set(found.values()) == {1}
    assert without_ranks(runs.folder) == rows(whole)
    assert samples(runs.folder) == samples(whole)
    assert writers_below(tmp_path) == []
    assert chaos.traces.left() == []
    print(*(f"{n} x {title}" for title, n in chaos.killed.most_common()), sep="\n")


def test_a_run_any_process_of_which_is_killed_learns_what_one_learns_that_is_left_alone(
    command, whole, root, tmp_path
):
    """On a cluster that it starts itself, whose processes are the run's, too."""
    runs = Runs([*command, "--actor-num-gpus-per-node", "2"], tmp_path / "runs/letters", root)
    chaos = Chaos(runs, list, lambda: None)
    chaos.rage(KILLS)
    check_learned(chaos, runs, whole, tmp_path)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of two machines with two cores each, for a rank and a server."""
    from slime_ray.launcher import set_environment

    set_environment()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_on_two_machines_any_process_of_a_run_and_the_second_machine_itself_may_be_killed(
    cluster, command, whole, root, tmp_path
):
    """The first machine is not the run's, and has the head of the cluster."""
    size = ["--actor-num-nodes", "2", "--ray-address", cluster.address, "--ray-device", "cpu"]
    runs = Runs([*command, *size], tmp_path / "runs/letters", root)

    def others() -> list[int]:
        return [each.process.pid for node in cluster.worker_nodes for each in node.all_processes["raylet"]]

    def again() -> None:
        for node in list(cluster.worker_nodes):
            if any(each.process.poll() is not None for each in node.all_processes["raylet"]):
                cluster.remove_node(node, allow_graceful=False)
        if not cluster.worker_nodes:
            cluster.add_node(num_cpus=2, node_ip_address=SECOND)

    chaos = Chaos(runs, others, again)
    chaos.rage(KILLS)
    again()
    check_learned(chaos, runs, whole, tmp_path)
    assert chaos.killed["raylet"] > 0 or KILLS < 25
    assert given_back(cluster)


def given_back(cluster: Any) -> bool:
    """Whether the cluster has all its cores again, within a while."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]:
                return True
            time.sleep(0.2)
        return False
    finally:
        ray.shutdown()


#: Who is killed of a run with real servers, one after the other, by what stands in its command line; and whether the run goes on.
REAL = {
    "slime_sglang.server.launch": True, "sglang::scheduler": True, "sglang_router": False, "ray::RankProcess": False,
    "ray::Machine": False, "workers import for": True, "-m slime_core train": False,
}  # fmt: skip


def test_each_process_of_a_run_with_real_servers_and_a_router_may_be_killed(sglang_run, root, tmp_path):
    """Two SGLang servers, sglang-router and a rank of Megatron's trainer."""
    sglang_run += [
        "--launcher",
        "ray",
        "--rollout-num-gpus",
        "2",
        "--use-fault-tolerance",
        "--router-policy",
        "round_robin",
    ]
    sglang_run += ["--save-interval", "1", "--num-rollout", str(3 * len(REAL))]
    runs, traces = Runs(sglang_run, tmp_path / "runs/letters", root), Traces()
    metrics, waiting = runs.folder / "metrics.jsonl", list(REAL)

    def steps() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    while waiting:
        with runs.attacked() as run:
            goes_on = True
            while waiting and goes_on:
                before = steps()
                run.wait_for(lambda before=before: steps() > before, 600)
                traces.take(run.living())
                victim, goes_on = waiting[0], REAL[waiting.pop(0)]
                os.kill(run.find(victim)[0], signal.SIGKILL)
            if not goes_on:
                run.finish(600)
                assert run.process.returncode in (1, -signal.SIGKILL)
                assert TOLD.search(run.told), (victim, run.told)
    with runs.attacked() as run:
        assert run.finish(600) == 0, run.told
    used = Counter(one["index"] for one in samples(runs.folder))
    assert used == Counter(range(3 * len(REAL) * 4 * 4))
    assert [row["step"] for row in rows(runs.folder)] == list(range(3 * len(REAL) + 1))
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows(runs.folder)[1:])
    assert traces.left() == []
    assert writers_below(tmp_path) == []
