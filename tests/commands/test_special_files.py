"""Pipes, devices, folders and names of thousands of letters where a file or a run is wanted: refused at once, never waited for."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slime_core.cli.main import run as slime
from slime_core.config.parsing.recipes import read_recipe
from slime_core.rundir.watched_run import WatchedRun

pytestmark = pytest.mark.timeout(120)
PIPE = "a pipe or a device, not a file"
COMMANDS = ("samples", "top", "trace", "replay --step 1", "kernels report")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to."""
    os.mkfifo(tmp_path / "pipe.yaml")
    return tmp_path / "pipe.yaml"


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a command in this process, which refuses what is typed; returns what it says."""

    def run(*words: object) -> str:
        status = slime([str(word) for word in words])
        told = capsys.readouterr().err
        assert status == 2, told
        assert "Traceback" not in told
        assert len(told) < 2500
        assert not (tmp_path / "runs").exists()
        return told

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a sample."""
    path = tmp_path / "a-run"
    (path / "rollouts").mkdir(parents=True)
    (path / "checkpoints").mkdir()
    (path / "config.toml").write_text("[run]\nnum_rollout = 3\n")
    row = {"index": 0, "prompt": "a", "response": "b", "response_length": 1, "reward": 1.0}
    (path / "rollouts/step_000001.jsonl").write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("command", ["check", "train", "doctor"])
def test_a_pipe_is_no_recipe(refused, pipe, command):
    assert f"{pipe}: found {PIPE}; wanted a readable recipe" in refused(command, pipe)


def test_a_device_is_no_recipe(refused):
    assert f"/dev/zero: found {PIPE}" in refused("check", "/dev/zero")


def test_a_recipe_has_an_end(tmp_path):
    (tmp_path / "large.toml").write_text("#" * (17 << 20))
    problems = []
    assert read_recipe(str(tmp_path / "large.toml"), problems) == {}
    assert "more than 16777216 characters" in str(problems[0])


def test_what_the_shell_makes_of_a_command_is_a_recipe(letters):
    code = "import sys; from slime_core.cli.main import run; sys.exit(run(sys.argv[1:]))"
    words = f"""exec "$1" -c '{code}' check <(cat "$2") --num-rollout 2"""
    result = subprocess.run(
        ["bash", "-c", words, "-", sys.executable, letters], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_pipe_is_no_file_of_served_models(refused, letters, pipe):
    words = ("check", letters, "--rollout-engine", "sglang", "--sglang-config", pipe)
    assert f"{pipe} ({PIPE})" in refused(*words)


def test_a_pipe_is_no_configuration_of_verl(refused, pipe):
    assert f"{pipe}: found {PIPE}" in refused("import-verl", pipe)


def test_a_pipe_is_no_evaluation_file(refused, letters, pipe):
    told = refused("check", letters, "--eval-config", pipe)
    assert (
        told
        == f"slime check: ConfigError\n  eval.eval_config ({pipe}): found no file; wanted a table of evaluation sets\n"
    )


def test_a_pipe_is_no_configuration_of_a_launch_script(refused, tmp_path, pipe):
    (tmp_path / "train.py").write_text("")
    assert PIPE in refused("check", tmp_path / "train.py", "--custom-config-path", pipe)


def test_a_pipe_is_no_configuration_of_a_model(tmp_path, refused, letters):
    os.mkfifo(tmp_path / "model/config.json")
    assert PIPE in refused("check", letters, "--tokenizer", "hf", "--rollout-engine", "torch")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_samples_are_in_a_file(folder, refused, make):
    path = folder / "rollouts/step_000001.jsonl"
    path.unlink()
    make(path)
    for words in (("samples", folder), ("diff", folder, folder)):
        assert f"{path}: found" in refused(*words)


def test_columns_of_samples_are_in_a_file(folder, capsys):
    os.mkfifo(folder / "rollouts/step_000001.npz")
    assert slime(["samples", str(folder), "--json"]) == 0
    assert PIPE in capsys.readouterr().err


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "summary.json", "log.txt", ".lock"])
def test_a_watched_run_waits_for_no_pipe(folder, name):
    os.mkfifo(folder / name)
    run = WatchedRun(folder)
    run.refresh()
    assert run.steps == []


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_what_is_nested_deep_is_passed_over(folder, name, capsys):
    text = '{"step": 1, "a": ' + "[" * 100_000
    (folder / name).write_text(text + "\n" + '{"step": 1' + "0" * 400 + "}\n")
    assert slime(["top", str(folder)]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_deep_summary_says_nothing(folder):
    (folder / "summary.json").write_text("[" * 100_000)
    run = WatchedRun(folder)
    run.refresh()
    assert run.summary == {}


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500])
def test_a_sample_that_is_nested_deep_is_left_out(folder, refused, line, capsys):
    with (folder / "rollouts/step_000001.jsonl").open("a") as file:
        file.write(line + "\n")
    assert slime(["samples", str(folder)]) == 0
    told = capsys.readouterr()
    assert "line 2: no sample in JSON; left out" in told.err
    assert "1 samples of 1 file" in told.out
    assert "line 2" in refused("diff", folder, folder)


def test_an_index_that_is_no_number_is_not_of_the_archive(folder, capsys):
    path = folder / "rollouts/step_000001.jsonl"
    columns = io.BytesIO()
    import numpy as np

    np.savez(columns, index=np.zeros(1, np.int64))
    path.with_suffix(".npz").write_bytes(columns.getvalue())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"index": [1, 2]}) + "\n")
    assert slime(["samples", str(folder), "--json"]) == 0
    assert "its columns are left out" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_of_thousands_of_letters_is_no_run(refused, command):
    name, *flags = command.split(" --")
    assert "does not exist; wanted the folder of a run" in refused(
        *name.split(), "x" * 5000, *(word for flag in flags for word in f"--{flag}".split())
    )


def test_names_of_thousands_of_letters_are_not_compared(refused):
    assert "does not exist; wanted the folder of a run" in refused("diff", "x" * 5000, "y" * 5000)


def test_what_is_compared_says_what_was_wanted(folder, refused):
    (folder / "rollouts/step_000001.jsonl").write_text("3\n")
    told = refused("diff", folder, folder)
    assert "line 1: no sample in JSON; wanted the samples of a step as a run writes them" in told


def test_a_group_and_a_plugin_that_are_not_there(refused):
    assert "no such group: 'slime.rewardz'; did you mean 'slime.rewards'? wanted one of" in refused(
        "plugins", "list", "rewardz"
    )
    told = refused("plugins", "show", "rewards", "mathh")
    assert "found 'mathh'; wanted the name of a plugin" in told
    assert "did you mean 'math'?" in told
