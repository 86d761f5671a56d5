"""The loops one-step-off and fully-async, killed at any time: what they repeat, and that no prompt is lost or used twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from slime_core.rundir.records import read_records

ENGINE = ["--rollout-engine", "letters.slow:create_engine"]


def command(recipe: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "slime_core", "train", str(recipe), *ENGINE, *flags]


@pytest.fixture
def environ(root):
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    }


def run(words: list[str], env: dict[str, str]) -> None:
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def rows(folder: Path) -> list[dict[str, float]]:
    """Everything in the metrics that is not a time, nor how far generation is ahead at the moment."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.startswith(("perf/", "rollout/groups_"))}
        for row in found
    ]


def samples(folder: Path, kind: str = "step_") -> list[dict]:
    files = sorted((folder / "rollouts").glob(f"{kind}*.jsonl"))
    times = ("timings", "non_generation_time")
    return [
        {key: value for key, value in sample.items() if key not in times} | {"step": int(file.stem[-6:])}
        for file in files
        for sample in read_records(file)
    ]


def kill_at_random(
    words: list[str],
    env: dict[str, str],
    *,
    draw: random.Random,
    begun: Path,
    number: signal.Signals = signal.SIGKILL,
) -> bool:
    """Start the command, and send it a signal some time after it has begun to train; returns whether it had not ended before."""
    mark = begun.stat().st_mtime_ns if begun.exists() else 0
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and (begun.stat().st_mtime_ns if begun.exists() else 0) == mark:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.4))
        if process.poll() is None:
            os.kill(process.pid, number)
            return True
        assert process.returncode == 0, process.stdout.read().decode()
        return False


@pytest.mark.faults
def test_one_step_off_repeats_itself_also_when_it_is_killed(letters, environ, tmp_path):
    flags = [
        "--loop",
        "one-step-off",
        "--save-interval",
        "1",
        "--lr",
        "4.0",
        "--rollout-max-response-len",
        "3",
    ]
    flags += ["--dynamic-sampling-filter-path", "letters.slow:some"]
    for name in ("first", "second"):
        run(command(letters, *flags, "--run-name", name), environ)
    draw, killed = random.Random(1), command(letters, *flags, "--run-name", "killed")
    folder = tmp_path / "runs/killed"
    for _ in range(4):
        kill_at_random(killed, environ, draw=draw, begun=folder / "metrics.jsonl")
    run(killed, environ)
    first, second = tmp_path / "runs/first", tmp_path / "runs/second"
    assert rows(first) == rows(second) == rows(folder)
    for kind in ("step_", "dropped_step_"):
        assert samples(first, kind) == samples(second, kind) == samples(folder, kind)
    assert {
        (one["step"] - 1 - int(one["weight_versions"][0])) for one in samples(first) if one["step"] > 1
    } == {1}
    ages = [row["rollout/staleness/mean"] for row in rows(first) if row["step"] > 1]
    assert ages == [1.0] * len(ages)


def test_a_bound_of_zero_is_the_loop_sync(letters, environ, tmp_path):
    run(command(letters, "--loop", "sync", "--run-name", "sync"), environ)
    run(command(letters, "--loop", "fully-async", "--max-staleness", "0", "--run-name", "bound"), environ)
    assert rows(tmp_path / "runs/sync") == rows(tmp_path / "runs/bound")
    assert samples(tmp_path / "runs/sync") == samples(tmp_path / "runs/bound")


TOOLS = {name: {"kind": "python", "function": f"talking_agents:{name}_tool"} for name in ("unruly", "stuck")}
#: How often a run of each variant is killed: 105 times in all.
N_KILLS = 15
VARIANTS = {
    "partial": ["--partial-rollout", "--rollout-max-response-len", "4"],
    "filter": ["--dynamic-sampling-filter-path", "letters.slow:some"],
    "hooks": [
        *("--rollout-sample-hook-path", "sample_hooks:mark"),
        *("--rollout-sample-filter-path", "sample_hooks:no_evens"),
        *("--dynamic-sampling-filter-path", "sample_hooks:equal_is_weak"),
        *("--buffer", "priority", "--buffer-filter-path", "sample_hooks:newest_first"),
    ],
    "fan-out": ["--custom-generate-function-path", "letters.slow:two_responses"],
    "multi-turn": [
        "--custom-generate-function-path",
        "letters.slow:two_turns",
        "--rollout-max-response-len",
        "4",
    ],
    "agent": [
        *("--custom-generate-function-path", "agent", "--agents-function", "talking_agents:unruly_letters"),
        *("--agents-timeout-s", "6"),
        *("--rollout-max-response-len", "8", "--n-samples-per-prompt", "4"),
    ],
    "tool-loop": [
        *("--custom-generate-function-path", "tool-loop", "--agents-tools", json.dumps(TOOLS)),
        *("--agents-tool-format", "talking_agents:LetterCalls", "--agents-tool-timeout-s", "0.2"),
        *("--tokenizer", "talking_agents:load_tokenizer"),
        *("--rollout-max-response-len", "4", "--n-samples-per-prompt", "4"),
    ],
}


def accounted(folder: Path) -> Counter[int]:
    """Return how often each prompt is in the run's folder in the end: trained on, dropped, or in the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    held = [entry["samples"] for entry in state["dispatcher"]["groups"]] + state["buffer"]["groups"]
    found = Counter(group[0]["group_index"] for group in held)
    for kind in ("step_", "dropped_step_"):
        used = {(one["step"], one["group_index"]) for one in samples(folder, kind)}
        found.update(index for _, index in used)
    return found


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", VARIANTS)
def test_of_fully_async_runs_that_are_killed_no_prompt_is_lost_or_used_twice(
    letters, environ, tmp_path, variant
):
    flags = ["--loop", "fully-async", "--max-staleness", "2", "--save-interval", "1", "--num-rollout", "120"]
    words = command(letters, *flags, *VARIANTS[variant], "--lr", "1.0")
    folder, draw = tmp_path / "runs/letters", random.Random(variant)
    n_kills = sum(
        kill_at_random(words, environ, draw=draw, begun=folder / "metrics.jsonl") for _ in range(N_KILLS)
    )
    run(words, environ)
    found, ages = (
        accounted(folder),
        [one["step"] - 1 - int(one["weight_versions"][0]) for one in samples(folder)],
    )
    assert [row["step"] for row in rows(folder)] == list(range(121))
    assert n_kills == N_KILLS
    assert set(found) == set(range(max(found) + 1))
    assert set(found.values()) == {1}
    assert max(ages) == 2
    dropped = {one["group_index"] for one in samples(folder, "dropped_step_")}
    print(
        f"{variant}: {len(found)} prompts, {len(found) - len(dropped)} trained or held, {len(dropped)} dropped"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--loop", "fully-async", "--colocate"], "the loop fully-async generates while it trains"),
        (["--loop", "one-step-off", "--colocate"], "the loop one-step-off generates while it trains"),
        (["--loop", "one-step-off", "--max-staleness", "0"], "at least 1: groups are generated a step ahead"),
        (["--update-weights-interval", "3"], "max_staleness of at least 2"),
        (["--disable-rollout-global-dataset"], "it beside data.prompt_data"),
        (
            ["--disable-rollout-global-dataset", "--prompt-data", "none"],
            "it with the generator single-turn; wanted --custom-generate-function-path",
        ),
        (["--loop", "fully-async", "--update-weights-interval", "3", "--max-staleness", "1"], "at least 2"),
        (
            ["--loop", "fully-async", "--rollout-function-path", "letters.slow:other_rollout"],
            "only the dispatcher generates through weight updates",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(letters, root, slime_here, monkeypatch, flags, told):
    monkeypatch.syspath_prepend(root / "tests/plugins")
    ended = slime_here("train", letters, *ENGINE, *flags)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 2, output
    assert told in " ".join(output.split())
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param("sync", marks=pytest.mark.faults),
        "one-step-off",
        pytest.param("fully-async", marks=pytest.mark.faults),
    ],
)
def test_a_run_without_a_data_set_learns_from_prompts_that_its_generator_brings(
    letters, environ, tmp_path, loop
):
    flags = [
        "--disable-rollout-global-dataset",
        "--prompt-data",
        "none",
        "--loop",
        loop,
        "--save-interval",
        "1",
    ]
    words = command(letters, *flags, "--custom-generate-function-path", "letters.slow:own_prompts")
    folder, draw = tmp_path / "runs/letters", random.Random(loop)
    kill_at_random(words, environ, draw=draw, begun=folder / "metrics.jsonl")
    run(words, environ)
    found = samples(folder)
    assert {one["index"] for one in found} == set(range(12 * 4 * 16))
    assert all(one["prompt"] == chr(97 + one["group_index"] % 10) for one in found)
    assert rows(folder)[-1]["eval/letters"] > 0.8


@pytest.mark.parametrize(
    "flags", [["--update-weights-in-flight", "continue"], ["--update-weights-interval", "2"]]
)
def test_samples_are_as_old_as_they_may_be(letters, environ, tmp_path, flags):
    given = [
        "--loop",
        "fully-async",
        "--max-staleness",
        "1",
        "--rollout-max-response-len",
        "3",
        "--lr",
        "1.0",
    ]
    run(command(letters, *given, *flags), environ)
    found = samples(tmp_path / "runs/letters")
    ages = [one["step"] - 1 - int(one["weight_versions"][0]) for one in found]
    assert {one["index"] for one in found} == set(range(12 * 4 * 16))
    assert max(ages) == 1
    if "2" in flags:
        assert {int(one["weight_versions"][0]) % 2 for one in found} == {0}


def test_an_engine_that_gave_up_its_weights_has_newer_ones_by_their_own_version(letters, environ, tmp_path):
    """Each step of this interval begins with an update, as the trainer had the engine's memory."""
    flags = [
        "--offload-rollout",
        "--update-weights-interval",
        "2",
        "--max-staleness",
        "1",
        "--num-rollout",
        "4",
    ]
    run(command(letters, *flags), environ)
    found = samples(tmp_path / "runs/letters")
    assert {(one["step"], one["weight_versions"][0]) for one in found} == {
        (step, str(step - 1)) for step in (1, 2, 3, 4)
    }


@pytest.mark.faults
@pytest.mark.parametrize("loop", ["sync", "one-step-off"])
def test_groups_that_wait_in_a_filtered_buffer_are_lost_and_used_twice_in_no_kill(
    letters, environ, tmp_path, loop
):
    flags = ["--loop", loop, "--over-sampling-batch-size", "9", "--partial-rollout", "--save-interval", "1"]
    words = command(
        letters, *flags, *VARIANTS["hooks"], "--rollout-max-response-len", "4", "--num-rollout", "20"
    )
    folder, draw = tmp_path / "runs/letters", random.Random(loop)
    ended = [kill_at_random(words, environ, draw=draw, begun=folder / "metrics.jsonl") for _ in range(3)]
    run(words, environ)
    found = accounted(folder)
    assert any(ended)
    assert [row["step"] for row in rows(folder)] == list(range(21))
    assert set(found) == set(range(max(found) + 1))
    assert set(found.values()) == {1}
    assert {len(one["metadata"]["seen"]) for one in samples(folder)} == {1}
    assert any("buffer_filter" in one["dropped"] for one in samples(folder, "dropped_step_"))


@pytest.mark.parametrize(
    ("number", "function"),
    [
        (signal.SIGTERM, "default"),
        pytest.param(signal.SIGKILL, "default", marks=pytest.mark.faults),
        pytest.param(signal.SIGTERM, "letters.slow:other_rollout", marks=pytest.mark.faults),
        pytest.param(signal.SIGKILL, "letters.slow:other_rollout", marks=pytest.mark.faults),
    ],
)
def test_one_step_off_loses_no_prompt_and_uses_none_twice(letters, environ, tmp_path, function, number):
    """SIGTERM mostly comes while a step is trained already and the next one is still being generated."""
    words = command(letters, "--loop", "one-step-off", "--rollout-function-path", function, "--lr", "1.0")
    words += ["--save-interval", "1", "--num-rollout", "20", *VARIANTS["filter"]]
    folder, draw = tmp_path / "runs/letters", random.Random(2)
    ended = [
        kill_at_random(words, environ, draw=draw, begun=folder / "metrics.jsonl", number=number)
        for _ in range(3)
    ]
    run(words, environ)
    found = accounted(folder)
    assert any(ended)
    assert [row["step"] for row in rows(folder)] == list(range(21))
    assert set(found) == set(range(max(found) + 1))
    assert set(found.values()) == {1}
    assert {index % 3 for index in {one["group_index"] for one in samples(folder)}} == {1, 2}


@pytest.mark.parametrize("mode", ["recompute", "continue"])
def test_an_evaluation_beside_generation_is_whole_and_of_the_weights_of_its_step(
    letters, environ, tmp_path, mode
):
    flags = ["--loop", "fully-async", "--max-staleness", "2", "--eval-interval", "2", "--lr", "1.0"]
    flags += ["--rollout-max-response-len", "3", "--update-weights-in-flight", mode]
    run(command(letters, *flags), environ)
    found = samples(tmp_path / "runs/letters", "eval_step_")
    assert {one["step"] for one in found} == {0, 2, 4, 6, 8, 10, 12}
    assert {one["status"] for one in found} <= {"completed", "truncated"}
    assert all(one["weight_versions"] == [str(one["step"])] for one in found)
