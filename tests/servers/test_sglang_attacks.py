"""Signals, kills and hostile rewards on a run with a real SGLang server: it goes on, or ends by name; nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ..plugins import hostile_scores
from .attacked import TOLD_S, Runs
from .whole_runs import check_whole

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]

ROLLOUT = ("--custom-generate-function-path", "slow_parts:generate")
TRAIN = ("--custom-megatron-before-train-step-hook-path", "slow_parts:before_train_step")
SERVER, SCHEDULER = "slime_sglang.server.launch", "sglang::scheduler"


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """Where updates lie; a real run has it in shared memory."""
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


@pytest.fixture
def runs(sglang_run: list[str], root: Path, staging: Path, tmp_path: Path) -> Runs:
    return Runs([*sglang_run, "--sglang-staging-dir", str(staging)], tmp_path / "runs/letters", root)


def test_a_run_that_is_attacked_again_and_again_has_every_step_and_sample_once(runs, staging):
    with runs.attacked(*ROLLOUT, halt="rollout 2") as run:
        assert run.send(signal.SIGINT, to_group=True) < TOLD_S
        runs.check_interrupted(run.finish(), signal.SIGINT, 1)
    assert list(staging.iterdir()) == []

    with runs.attacked(*ROLLOUT, halt="rollout 3") as run:
        assert list(staging.glob("slime-weights-*/weights.bin")) != []
        run.kill()
        assert list(staging.iterdir()) == []
    runs.check_saved(2)

    with runs.attacked(*TRAIN, halt="train 3") as run:
        assert run.send(signal.SIGTERM) < TOLD_S
        runs.check_interrupted(run.finish(), signal.SIGTERM, 3)
    assert list(staging.iterdir()) == []

    with runs.attacked(*ROLLOUT, halt="rollout 4") as run:
        assert run.send(signal.SIGHUP, to_group=True) < TOLD_S  # as a terminal does that is closed
        runs.check_interrupted(run.finish(), signal.SIGHUP, 3)
    assert list(staging.iterdir()) == []

    with runs.attacked(*TRAIN, halt="train 4") as run:
        run.send(signal.SIGTERM)
        run.send(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT
        assert "SIGINT: ending at once" in run.told
    assert list(staging.iterdir()) == []
    runs.check_saved(3)

    with runs.attacked() as run:
        assert run.finish() == 0, run.told
    assert runs.summary["status"] == "completed"
    check_whole(runs.folder)


@pytest.mark.parametrize("there", [SERVER, SCHEDULER])
def test_a_run_that_is_killed_while_its_server_starts_leaves_nothing(runs, staging, there):
    with runs.attacked() as run:
        run.wait_for(lambda: bool(run.find(there)))
        run.kill()
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize(
    ("who", "number", "why"),
    [
        (SERVER, signal.SIGKILL, "slime train: EngineError\n  the SGLang server ended with status -9"),
        (SCHEDULER, signal.SIGKILL, "slime train: EngineError\n  the SGLang server ended with status "),
        (SERVER, signal.SIGSTOP, "slime train: DeadlineError\n"),
        (SCHEDULER, signal.SIGSTOP, "slime train: DeadlineError\n"),
    ],
)
def test_a_server_that_is_killed_or_stopped_in_a_rollout_ends_the_run_by_name(
    runs, staging, who, number, why
):
    with runs.attacked(*ROLLOUT, "--sglang-request-timeout-s", "15", halt="rollout 2") as run:
        (victim,) = run.find(who)
        os.kill(victim, number)
        assert run.finish(120) == 1
        assert why in run.told
    if (
        number == signal.SIGSTOP
    ):  # who is stopped says nothing; the other process of the server does, and the driver
        told = runs.log[runs.log.index("; this process was at\n") :]
        assert "slime_sglang/http/client.py" in told
        other = "in run_scheduler_process" if who == SERVER else "in launch_server"
        assert other in told[told.index("\nthe SGLang server was at\n") :]
        assert re.search(
            r"no answer to generate from the SGLang server, at .+; stacks of both ends are", told
        )
    assert (runs.summary["status"], runs.summary["steps"]) == ("failed", 1)
    assert list(staging.iterdir()) == []


def test_hostile_rewards_fail_by_name_and_the_run_goes_on_without_their_samples(runs, staging, tmp_path):
    data = hostile_scores.write_rows(tmp_path / "hostile.jsonl")
    flags = ("--prompt-data", str(data), *hostile_scores.FLAGS, "--on-reward-error", "drop")
    with runs.attacked(*flags) as run:
        assert run.finish(800) == 0, run.told
    hostile_scores.check_dropped(runs.folder)
    assert list(staging.iterdir()) == []


def test_a_reward_that_kills_its_guard_ends_a_run_by_name_where_it_is_to(runs, staging, tmp_path):
    data = hostile_scores.write_rows(tmp_path / "hostile.jsonl", ("kill_its_guard",))
    with runs.attacked("--prompt-data", str(data), *hostile_scores.FLAGS, "--rollout-batch-size", "1") as run:
        assert run.finish() == 2, run.told
        assert "slime train: RewardError\n  sample " in run.told
    assert (runs.summary["status"], runs.summary["steps"]) == ("failed", 0)
    assert list(staging.iterdir()) == []
