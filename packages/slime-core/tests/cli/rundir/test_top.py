"""`slime top` over run folders that are written by hand, at a time that the test chooses."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import time

import pytest
from rich.console import Console
from slime_core.cli.main import run as slime
from slime_core.cli.rundir.top import bars, view
from slime_core.rundir.watched_run import WatchedRun

#: Unix seconds at which the process of the run began.
BEGAN = 1_800_000_000.0
CONFIG = """[run]
num_rollout = 10
num_epoch = "none"
[rollout]
n_samples_per_prompt = 4
[eval]
eval_interval = 5
[checkpoint]
save_interval = 5
"""
HEADER = {"name": "header", "version": 1, "wall_clock": BEGAN, "pid": 1, "step": 1}
EVENTS = [
    HEADER,
    {"name": "step", "lane": "loop", "begin": 10.0, "seconds": 10.0, "step": 2},
    {"name": "group_submitted", "lane": "dispatcher", "at": 20.5, "number": 4, "group": 4, "version": 2},
    {"name": "group_submitted", "lane": "dispatcher", "at": 20.5, "number": 5, "group": 5, "version": 2},
    {
        "name": "request",
        "lane": "engine",
        "begin": 21.0,
        "seconds": 1.0,
        "group": 4,
        "tokens": 60,
        "evaluation": False,
    },
    {"name": "batch", "lane": "loop", "begin": 24.0, "seconds": 1.0, "step": 3},
]


def row(step, **more):
    return {
        "step": step, "rollout/raw_reward": 0.1 * step, "perf/step_time": 10.0, "rollout/samples": 40.0,
        "perf/train_tokens": 5000.0, "perf/engine_idle_share": 0.25, "perf/trainer_idle_share": 0.5,
        "rollout/response_len/mean": 12.5, "rollout/truncated_ratio": 0.125, **more,
    }  # fmt: skip


ROWS = [
    {"step": 0, "eval/math": 0.25, "eval/math-truncated_ratio": 0.0},
    row(1),
    row(2, **{"eval/math": 0.5}),
]


def write(folder, *, rows=ROWS, events=EVENTS, summary=None, log="", at=BEGAN + 30):
    """Write a run that this process has locked as it began, and wrote to `at` last."""
    (folder / "checkpoints/step_000002").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    for name, of in (("metrics.jsonl", rows), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in of))
    (folder / "log.txt").write_text(log)
    lock(folder, os.getpid(), socket.gethostname(), at=BEGAN - 3)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    for name in ("metrics.jsonl", "events.jsonl", "log.txt", "summary.json", "checkpoints/step_000002"):
        if (folder / name).exists():
            os.utime(folder / name, (at, at))


def lock(folder, pid, host, *, at):
    (folder / ".lock").write_text(f"process {pid} on {host}")
    os.utime(folder / ".lock", (at, at))


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "runs/a"
    found.mkdir(parents=True)
    return found


def shown(folder, *, now=BEGAN + 32, width=120):
    """Return name -> what is said of it; rows without a name are added to the one before."""
    run = WatchedRun(folder, clock=lambda: now)
    run.refresh()
    console = Console(file=io.StringIO(), width=width)
    console.print(view(run, width=width))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    said, name = {}, ""
    for line in text.splitlines():
        found, value = re.fullmatch(r"(\S*(?: \S+)*) *  (.*?) *", line.ljust(width)).groups()
        name = found or name
        said[name] = f"{said.get(name, '')} {value.strip()}".strip()
    return said


def test_a_run_that_goes_on_says_where_it_is(folder):
    write(folder)
    said = shown(folder)
    assert said["run"] == f"{folder}  running"
    assert said["step"].startswith("2 of 10  ━")
    assert said["step"].endswith("20%")
    # Eight steps of 10 s; of that the 2 s since the last row of metrics.
    assert said["left"].startswith("1 min 18 s, until ")
    assert said["now"] == "train of step 3 for 7.0 s"
    assert said["queues"] == "2 groups (7 requests) in flight, 0 finished ones wait"
    assert said["engine"] == "2 tokens/s, 0.0 requests/s answered in the last 30 s"
    assert said["step 2"] == "10.0 s a step, 50 tokens/s generated, 500 tokens/s trained on, 4.0 samples/s"
    assert said["idle"] == "engine 25%, trainer 50%"
    assert said["staleness"].startswith("0: ")
    assert said["reward"] == "0.200  ▁█  since step 1, which had 0.100"
    assert said["responses"] == "12.5 tokens, 12% cut off"
    assert said["evaluation"] == "math 0.250 → 0.500 (after step 2)"  # and nothing of what was cut off
    assert said["checkpoint"] == "step 2, 2.0 s ago"
    assert "warnings" not in said


def test_staleness_and_limited_requests_are_told(folder):
    more = {
        "rollout/staleness/mean": 0.75, "rollout/staleness/max": 2.0, "rollout/concurrency": 64.0,
        "rollout/requests_in_flight": 60.0, "rollout/requests_waiting": 5.0, "engine/retractions": 3.0,
    }  # fmt: skip
    write(folder, rows=[row(1), row(2, **more)])
    said = shown(folder)
    assert said["staleness"] == "mean 0.75, at most 2 steps"
    assert said["requests"] == "limit 64, at most 60 in flight, 5 waited for it, 3 retracted"


@pytest.mark.parametrize("status", ["completed", "interrupted", "failed"])
def test_a_run_that_has_ended_says_how_and_nothing_of_now(folder, status):
    write(
        folder,
        summary={"status": status, "steps": 2, "wall_s": 95.0, "error": "RewardError: no\nmore \x1b[31m"},
    )
    said = shown(folder, now=BEGAN + 1000)
    assert said["run"] == f"{folder}  {status}"
    assert said["took"] == "1 min 35 s"
    assert said["error"] == "RewardError: no?more ?[31m"
    assert {"now", "left", "queues", "engine"} & set(said) == set()


def test_a_summary_of_an_earlier_process_is_not_this_ones(folder):
    write(folder, summary={"status": "interrupted", "steps": 1})
    os.utime(folder / "summary.json", (BEGAN - 60, BEGAN - 60))
    assert shown(folder)["run"].endswith("running")


def test_a_process_that_has_locked_the_folder_and_told_nothing_yet_starts(folder):
    write(folder, summary={"status": "interrupted", "steps": 2}, at=BEGAN + 30)
    lock(folder, os.getpid(), socket.gethostname(), at=BEGAN + 500)
    said = shown(folder, now=BEGAN + 520)
    assert said["run"].endswith("starting")
    assert said["now"].startswith("starts: ")


def test_a_process_that_is_gone_without_a_summary_was_killed(folder):
    write(folder)
    child = subprocess.Popen(["true"])
    child.wait()
    lock(folder, child.pid, socket.gethostname(), at=BEGAN - 3)
    assert shown(folder)["run"].endswith("ended without a word: killed?")


def test_of_another_host_it_is_said_how_long_nothing_was_written(folder):
    write(folder)
    lock(folder, 1, "elsewhere", at=BEGAN - 3)
    said = shown(folder, now=BEGAN + 30 + 3 * 86400)
    assert said["run"].endswith("running")
    assert said["quiet"] == "nothing was written for 3 d 0 h"


def test_without_events_and_with_an_unknown_number_of_steps_the_rest_is_told(folder):
    write(folder)
    (folder / "events.jsonl").unlink()
    (folder / "config.toml").write_text('[run]\nnum_rollout = "none"\nnum_epoch = 3\n')
    said = shown(folder)
    assert said["step"].startswith("2 done; ")
    assert "(--no-events)" in said["now"]
    assert "left" not in said
    assert said["reward"].startswith("0.200")


def test_the_last_warnings_of_the_log_are_shown_and_all_are_counted(folder):
    log = "".join(f"2026-01-01 10:00:0{n},123 WARNING slime_core.x: number {n}\n" for n in range(5))
    write(folder, log=f"{log}Traceback\n2026-01-01 10:00:09,1 INFO slime_core.x: no\n")
    assert (
        shown(folder)["warnings"] == "10:00:02 number 2 10:00:03 number 3 10:00:04 number 4 5 in all: log.txt"
    )


def test_what_is_added_is_seen_and_half_a_row_and_nonsense_are_not(folder):
    write(folder)
    now = BEGAN + 40
    run = WatchedRun(folder, clock=lambda: now)
    run.refresh()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps(row(3, **{"train/loss": float("nan"), "train/grad_norm": None})) + "\nnull\n{\n"
        )
        file.write('{"step": 4, ')
    run.refresh()
    assert run.done_steps == 3
    assert "train/grad_norm" not in run.steps[-1]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('"perf/step_time": 1.0}\n')
    run.refresh()
    assert (run.done_steps, len(run.rows)) == (4, 5)


def test_rows_that_a_resumed_run_takes_back_are_gone(folder):
    write(folder)
    run = WatchedRun(folder)
    run.refresh()
    (folder / "new").write_text(json.dumps(ROWS[1]) + "\n")
    (folder / "new").replace(folder / "metrics.jsonl")
    run.refresh()
    assert (run.done_steps, len(run.rows)) == (1, 1)


def test_a_run_of_which_nothing_but_the_settings_is_there_is_shown(folder):
    (folder / "config.toml").write_text(CONFIG)
    said = shown(folder)
    assert said["step"].startswith("0 of 10")
    assert said["checkpoint"] == "none yet"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal(folder, width):
    write(folder, log="2026-01-01 10:00:00,123 WARNING slime_core.x: " + "long " * 60 + "\n")
    assert shown(folder, width=width)["step"].startswith(
        "2 of 10  ━"
    )  # which looks at the width of each line


def test_bars_go_from_the_lowest_to_the_highest_number():
    assert bars([0.0, 7.0, 3.0]) == "▁█▄"
    assert bars([2.0, 2.0]) == "▁▁"
    assert bars([1.0, float("nan"), 2.0, float("inf")]) == "▁?█?"
    assert bars([]) == ""


def test_it_prints_once_where_the_output_is_no_terminal(folder, capsys):
    write(folder)
    assert slime(["top", str(folder)]) == 0
    assert re.search(r"^step +2 of 10 ", capsys.readouterr().out, re.M)


def test_what_is_no_run_is_refused_with_those_that_are(folder, capsys):
    write(folder)
    assert slime(["top", str(folder.parent)]) == 2
    told = capsys.readouterr().err
    assert "which has no config.toml; wanted the folder of a run" in told
    assert str(folder) in told


@pytest.mark.parametrize("interval", ["0", "nan", "a minute"])
def test_an_interval_that_is_none_is_refused(folder, capsys, interval):
    with pytest.raises(SystemExit) as ended:
        slime(["top", str(folder), "--interval", interval])
    assert ended.value.code == 2
    assert f"found {interval}; wanted seconds from 0.1 to 3600" in capsys.readouterr().err


def test_in_a_terminal_it_follows_the_run_until_that_has_ended(folder):
    began = time.time() - 30
    write(folder, events=[HEADER | {"wall_clock": began}, *EVENTS[1:]], at=began + 29)
    lock(folder, os.getpid(), socket.gethostname(), at=began - 3)
    main, follower = pty.openpty()
    command = [sys.executable, "-m", "slime_core", "top", str(folder), "--interval", "0.1"]
    environment = os.environ | {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    seen = b""
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)

        def wait_for(text):
            nonlocal seen
            while text not in seen:
                seen += os.read(main, 65536)

        wait_for(b"2 of 10")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row(3)) + "\n")
        wait_for(b"3 of 10")
        (folder / "summary.json").write_text(json.dumps({"status": "completed", "steps": 3}))
        wait_for(b"completed")
        assert process.wait(60) == 0
    os.close(main)
