"""Any process of a run under Ray is killed, at any time: the run goes on, or ends by name and is gone on from."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry

from ..runs.asynchronous.test_async_loops import accounted, rows, samples
from ..servers.attacked import Attacked, Runs, Traces, writers_below

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

#: How many processes are killed; SLIME_TEST_KILLS has it be more, or fewer.
KILLS = int(os.environ.get("SLIME_TEST_KILLS", "10"))
#: Enough that there are some left after the last.
STEPS = 15 * KILLS
#: One kill of so many comes while the run starts.
STARTS = 6
FLAGS = [
    *("--rollout-engine", "letters.served:create_engine", "--loop", "one-step-off", "--lr", "1.0"),
    *("--save-interval", "1", "--num-rollout", str(STEPS)),
]
#: A run that ended by itself says why; of one that was killed, or ended by Ray, its guard does.
TOLD = re.compile(r"^slime( train)?: \w", re.MULTILINE)


class Chaos:
    """Kills processes of a run, and starts it again where it ended.

    Args:
        runs: how it is started.
    """

    def __init__(self, runs: Runs) -> None:
        self.killed, self.traces = Counter[str](), Traces()
        self._runs = runs
        self._metrics, self._draw = runs.folder / "metrics.jsonl", random.Random("chaos")

    def rage(self, count: int) -> None:
        """Kill so many processes; the run has steps left then."""
        while self.killed.total() < count:
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
                assert time.monotonic() < deadline, (run.told, list(self.killed), run.living())
                time.sleep(0.02)
        until = time.monotonic() + self._draw.uniform(0, 1)
        while time.monotonic() < until and run.process.poll() is None:
            time.sleep(0.02)
        found = {pid: title for pid, title in run.living().items() if title} | dict(
            writers_below(self._runs.folder)
        )
        self.traces.take(found)
        if run.process.poll() is not None or not found:
            return ""
        pid = self._draw.choice(sorted(found))
        os.kill(pid, signal.SIGKILL)
        return kind_of(found[pid], is_driver=pid == run.process.pid)

    def _steps(self) -> int:
        return self._metrics.read_text().count("\n") if self._metrics.exists() else 0


#: Who a process is, by what stands in its command line.
KINDS = {
    "slime_ray/placement/guard.py": "guard", "ray::RankProcess": "rank", "ray::Machine": "machine's actor", "letters/served.py": "server",
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
    return [*words, "--train-backend", "letters.ranked:create_trainer"]


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
    chaos = Chaos(runs)
    chaos.rage(KILLS)
    check_learned(chaos, runs, whole, tmp_path)
