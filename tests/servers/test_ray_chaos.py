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

from ..runs.test_async_loops import accounted, rows, samples
from .attacked import Attacked, Runs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

#: How many processes are killed; SLIME_TEST_KILLS has it be more.
KILLS = int(os.environ.get("SLIME_TEST_KILLS", "4"))
#: Enough that there are some left after the last.
STEPS = 15 * KILLS


def kill_one(run: Attacked, metrics: Path, draw: random.Random) -> str:
    """Kill a process of the run some time after its next step; returns its command line, empty if the run ended before."""

    def steps() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    before, deadline = steps(), time.monotonic() + 300
    while steps() == before:
        if run.process.poll() is not None:
            return ""
        assert time.monotonic() < deadline, run.told
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 1))
    pid, title = draw.choice(sorted(run.living().items()))
    os.kill(pid, signal.SIGKILL)
    return title


def without_ranks(folder: Path) -> list[dict[str, float]]:
    """The metrics that are the same with one rank and with two."""
    return [{key: value for key, value in row.items() if key != "train/ranks"} for row in rows(folder)]


def test_a_run_any_process_of_which_is_killed_learns_what_one_learns_that_is_left_alone(
    letters, root, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(root / "tests/plugins")
    flags = ["--rollout-engine", "slow_letters:create_engine", "--loop", "one-step-off", "--lr", "1.0"]
    flags += ["--save-interval", "1", "--num-rollout", str(STEPS)]
    registry = Registry()
    settings = load_settings([str(letters)], [*flags, "--run-name", "whole"], registry=registry)
    assert launch(settings, registry, drive)["status"] == "completed"
    command = [sys.executable, "-m", "slime_core", "train", str(letters), *flags, "--launcher", "ray"]
    command += ["--train-backend", "ranked_letters:create_trainer", "--actor-num-gpus-per-node", "2"]
    folder, draw, killed = tmp_path / "runs/letters", random.Random("chaos"), Counter()
    runs = Runs(command, folder, root)
    while killed.total() < KILLS:
        with runs.attacked() as run:
            while killed.total() < KILLS and (title := kill_one(run, folder / "metrics.jsonl", draw)):
                killed[title] += 1
            if killed.total() < KILLS:
                status = run.finish()
                assert len(rows(folder)) <= STEPS, "it was through before so many were killed"
                assert status == 0 or re.search(r"^slime( train)?: \w", run.told, re.M), (status, run.told)
    with runs.attacked() as run:
        assert run.finish() == 0, run.told
    whole, found = tmp_path / "runs/whole", accounted(folder)
    assert set(found) == set(range(max(found) + 1))
    assert set(found.values()) == {1}
    assert without_ranks(folder) == rows(whole)
    assert samples(folder) == samples(whole)
    print(*(f"{n} x {title[:120]}" for title, n in killed.items()), sep="\n")
