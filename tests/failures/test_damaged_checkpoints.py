"""Checkpoints that were damaged, renamed or replaced, and resumes that are refused: whole `slime` commands."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slime_core.cli import main
from slime_core.config.load import load_settings
from slime_core.files.checksums import seal
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry

pytestmark = pytest.mark.timeout(300)

SHORT = ("--num-rollout", "6", "--eval-interval", "none", "--save-interval", "2")


def train(recipe: Path, *flags: str) -> dict[str, Any]:
    registry = Registry()
    return launch(load_settings([str(recipe)], [*SHORT, *flags], registry=registry), registry, drive)


@pytest.fixture
def run(letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run that took 4 of 6 steps: checkpoints of steps 2 and 4."""
    train(letters, "--num-rollout", "4")
    capsys.readouterr()
    return tmp_path / "runs/letters"


@pytest.fixture
def refused(letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Returns a function that runs a command which is to be refused and to write nothing; returns what it told."""

    def refuse(command: str, *flags: str, leaves: bool = True) -> str:
        before = contents(tmp_path / "runs")
        assert main.run([command, str(letters), *SHORT, *flags]) == 2
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert 0 < len(told.splitlines()) < 15
        if leaves:
            assert contents(tmp_path / "runs") == before
        return told

    return refuse


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("log.txt", ".lock")
    }


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_is_refused_by_each_command_and_the_run_goes_on_from_the_one_before(
    letters, run, refused, tmp_path, capsys
):
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)
    newest, before = run / "checkpoints/step_000004", run / "checkpoints/step_000002"
    flip(newest / "trainer/table.npy", 1000)
    message = f"{newest}: found changed: trainer/table.npy; wanted the files of its save"
    for command, flags in (
        ("train", ()),
        ("train", ("--run-name", "other", "--load", str(run))),
        ("eval", ("--load", str(run), "--eval-interval", "1")),
    ):
        told = refused(command, *flags)
        assert message in told
        assert f"the newest intact one before it is {before}: to go on from there, `mv {newest} " in told
    told = refused("train", "--run-name", "other", "--load", str(newest))
    assert f"the newest intact one before it is {before}: give that one" in told
    newest.rename(f"{newest}.damaged")
    assert train(letters)["steps"] == 6
    shutil.rmtree(run)
    whole.rename(run)
    capsys.readouterr()
    assert main.run(["train", str(letters), *SHORT, "--run-name", "other", "--load", str(before)]) == 0
    assert "completed: 6 steps" in capsys.readouterr().out


def test_a_renamed_checkpoint_is_not_believed(run, refused):
    (run / "checkpoints/step_000004").rename(run / "checkpoints/step_000099")
    assert "step_000099: found the checkpoint that step_000004 was; " in refused("train")


def test_flipped_bytes_are_refused_and_the_intact_checkpoint_before_is_named(run, refused):
    generator, newest = random.Random(0), run / "checkpoints/step_000004"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert len(files) == 3
    for path in files:
        whole = path.read_bytes()
        flip(path, generator.randrange(len(whole)))
        assert f"before it is {run}/checkpoints/step_000002: " in refused("train")
        path.write_bytes(whole)


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def as_array(bomb: Bomb, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([bomb], dtype=object), allow_pickle=True)


def as_pickle(bomb: Bomb, path: Path) -> None:
    path.write_bytes(pickle.dumps(bomb))


def test_a_pickle_in_any_file_of_a_run_is_not_executed(letters, run, tmp_path, capsys):
    marker, newest = tmp_path / "executed", Path("checkpoints/step_000004")
    as_array(Bomb(marker), tmp_path / "bomb.npy")
    np.load(tmp_path / "bomb.npy", allow_pickle=True)
    marker.rmdir()
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)
    for file, write in (
        (newest / "trainer/table.npy", as_pickle),
        (newest / "trainer/table.npy", as_array),
        (newest / "state.json", as_pickle),
        (newest / "manifest.json", as_pickle),
        (Path("config.toml"), as_pickle),
        (Path("summary.json"), as_pickle),
        (Path("metrics.jsonl"), as_pickle),
        (Path("plugins.lock.json"), as_pickle),
        (Path("rollouts/step_000004.jsonl"), as_pickle),
        (Path(".lock"), as_pickle),
    ):
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        write(Bomb(marker), run / file)
        if file.name in ("table.npy", "state.json"):
            seal(run / newest, 4)  # as whoever put it there would
        is_read = file.name not in ("plugins.lock.json", ".lock") and file.parts[0] != "rollouts"
        assert main.run(["train", str(letters), *SHORT]) == (2 if is_read else 0), file
        told = capsys.readouterr().err
        assert not marker.exists()
        assert "Traceback" not in told
        assert file.name in told or not is_read


def test_a_resume_that_the_trainer_refuses_changes_nothing(run, refused, monkeypatch, tmp_path):
    (tmp_path / "picky.py").write_text("""
from slime_core.errors import CheckpointError
from slime_core.config.factories import TrainerFactory
from slime_core.testing import tabular
class Picky(tabular.TabularTrainer):
    async def load(self, path):
        raise CheckpointError("checkpoint: bf16 is True, this trainer's is False")
def create_trainer(build):
    made = tabular.create_trainer(build)
    made.__class__ = Picky
    return made
create_trainer = TrainerFactory(create_trainer, tabular.TabularTrainer.capabilities)
""")
    monkeypatch.syspath_prepend(tmp_path)
    told = refused("train", "--train-backend", "picky:create_trainer", "--lr", "0.5")
    assert "bf16 is True" in told
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


def test_a_resume_with_other_data_is_refused_before_the_trainer_starts(letters, run, refused, tmp_path):
    path = tmp_path / "letters.jsonl"
    path.write_text(path.read_text().replace('"j"', '"k"'))
    assert "resume with the data set" in refused("train", "--lr", "0.5")


def test_groups_that_wait_with_another_number_of_samples_are_refused(run, refused):
    newest = run / "checkpoints/step_000004"
    state = json.loads((newest / "state.json").read_text())
    group = [{"index": i, "group_index": 7, "prompt": "a", "tokens": [0]} for i in range(16)]
    (newest / "state.json").write_text(json.dumps(state | {"buffer": {"groups": [group]}}))
    seal(newest, 4)
    told = refused("train", "--n-samples-per-prompt", "8")
    assert "waits with 16 samples of its prompt, this run has 8; go on with --n-samples-per-prompt 16" in told


STATES = {
    "step": (3, "step 3, which the folder's name contradicts"),
    "wall_s": (float("nan"), "wall_s"),
    "eval_before": ("x", "eval_before"),
    "largest_logprob_diff": (-1.0, "largest_logprob_diff"),
    "buffer": ([], "buffer"),
    "source": ({}, "source: found a state that PromptSource cannot read (KeyError: 'length')"),
}


@pytest.mark.parametrize("key", STATES)
def test_a_state_of_other_types_is_refused(run, refused, key):
    newest = run / "checkpoints/step_000004"
    state, (value, message) = json.loads((newest / "state.json").read_text()), STATES[key]
    (newest / "state.json").write_text(json.dumps(state | {key: value}))
    seal(newest, 4)
    told = refused("train")
    assert "state.json" in told
    assert message in told


def test_a_source_position_that_is_none_is_refused(run, refused):
    newest = run / "checkpoints/step_000004"
    state = json.loads((newest / "state.json").read_text())
    for change in ({"offset": -1}, {"offset": 10}, {"epoch": "1"}, {"index": 1.0}, {"group_index": True}):
        (newest / "state.json").write_text(json.dumps(state | {"source": state["source"] | change}))
        seal(newest, 4)
        assert "wanted a position among 10 prompts" in refused("train")


def test_a_resumed_run_is_held_to_the_agreement_of_its_first_part(letters, run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    worst = [line["train/train_rollout_logprob_abs_diff/worst_sample"] for line in lines if line["step"] > 0]
    newest = run / "checkpoints/step_000004"
    state = json.loads((newest / "state.json").read_text())
    assert state["largest_logprob_diff"] == max(worst) < 0.003
    (newest / "state.json").write_text(json.dumps(state | {"largest_logprob_diff": 0.003}))
    seal(newest, 4)
    train(letters)
    state = json.loads((run / "checkpoints/step_000006/state.json").read_text())
    assert state["largest_logprob_diff"] == 0.003


def rows(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_evaluation_before_the_first_step_is_told_once_after_a_kill_before_the_first_checkpoint(
    letters, tmp_path
):
    run = tmp_path / "runs/letters"
    train(letters, "--num-rollout", "2", "--eval-interval", "2")
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    assert rows(run) == [0, 1, 2]
    train(letters, "--num-rollout", "2", "--eval-interval", "2")
    assert rows(run) == [0, 1, 2]


def test_a_row_that_a_crash_has_cut_is_dropped_and_no_other(letters, run):
    path = run / "metrics.jsonl"
    whole = path.read_text()
    for cut in (whole[:-1], whole + '{"step": 5, "rollout/ra', whole + "{", whole + "\0" * 9):
        path.write_text(cut)
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"status": "failed"}))
        train(letters, "--num-rollout", "4")
        assert path.read_text() == whole


def test_a_run_of_which_every_optimizer_step_was_skipped_is_not_completed(
    letters, tmp_path, monkeypatch, capsys
):
    (tmp_path / "skipping.py").write_text("""
from slime_core.config.factories import TrainerFactory
from slime_core.testing import tabular
class Skipping(tabular.TabularTrainer):
    async def train(self, batch):
        skipped = len(batch.optimizer_steps) - (batch.step == 2 and self._lr == 1.0)
        return {"train/loss": 0.0, "train/skipped_steps": float(skipped)}
def create_trainer(build):
    made = tabular.create_trainer(build)
    made.__class__ = Skipping
    return made
create_trainer = TrainerFactory(create_trainer, tabular.TabularTrainer.capabilities)
""")
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--num-rollout", "4", "--eval-interval", "none", "--train-backend", "skipping:create_trainer"]
    assert main.run(["train", str(letters), *flags, "--lr", "2"]) == 1
    told = capsys.readouterr().err
    assert "step 4: the last step, and all 4 optimizer steps since the start were skipped" in told
    assert json.loads((tmp_path / "runs/letters/summary.json").read_text())["status"] == "failed"
    assert main.run(["train", str(letters), *flags, "--lr", "1", "--overwrite"]) == 0


ODD_FOLDERS = {
    "a long name": (("--run-name", "x" * 300), "run.run_name"),
    "a name of long letters": (("--run-name", "\u00e9" * 200), "run.run_name"),
    "a long path": (("--output-dir", "/tmp/" + "x/" * 2500), "run.output_dir"),
    "a device": (("--output-dir", "/dev/null"), "run.output_dir"),
    "below a device": (("--output-dir", "/dev/null/runs"), "run.output_dir"),
    "no text": (("--output-dir", "runs\udcff"), "word 3 of the command"),
    "a null": (("--set", 'run.run_name="a\\u0000b"'), "run.run_name"),
    "no fields": (("--save-hf", "out/hf"), "checkpoint.save_hf"),
    "another field": (("--save-hf", "out/{stepp}"), "checkpoint.save_hf"),
    "an attribute": (("--save-hf", "out/{step.__class__}"), "checkpoint.save_hf"),
    "an item": (("--save-hf", "out/{step[0]}"), "checkpoint.save_hf"),
    "a number": (("--save-hf", "out/{0}"), "checkpoint.save_hf"),
    "a conversion": (("--save-hf", "out/{step!r}"), "checkpoint.save_hf"),
    "a wide field": (("--save-hf", "out/{step:999999999999}"), "checkpoint.save_hf"),
    "a fraction": (("--save-hf", "out/{step:.2f}"), "checkpoint.save_hf"),
    "a brace": (("--save-hf", "out/{step"), "checkpoint.save_hf"),
    "below a file": (("--save-hf", "/dev/null/{step}"), "checkpoint.save_hf"),
    "a long folder": (("--save-hf", f"out/{'x' * 250}{{step}}"), "checkpoint.save_hf"),
    "the checkpoints": (("--save-hf", "{run}/checkpoints/step_{{step:06d}}"), "checkpoint.save_hf"),
}


@pytest.mark.parametrize("kind", ODD_FOLDERS)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(letters, tmp_path, capsys, kind):
    flags, where = ODD_FOLDERS[kind]
    if "{run}" in flags[1]:
        flags = (flags[0], flags[1].format(run=tmp_path / "runs/letters"))
    for command in ("check", "train") if kind in ("a long name", "an attribute") else ("train",):
        assert main.run([command, str(letters), *flags]) == 2
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        assert f"{where}: found " in told.err
        assert len(told.err) < 1500
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("folder", ["file", "/proc", "/sys"])
def test_an_output_folder_that_is_a_file_or_takes_none_is_refused(letters, tmp_path, capsys, folder):
    (tmp_path / "file").touch()
    assert main.run(["train", str(letters), "--output-dir", str(tmp_path / folder)]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / folder) in told
    assert "wanted" in told


def test_a_pattern_of_hugging_face_folders_may_pad_its_numbers(letters, tmp_path):
    train(letters, "--num-rollout", "2", "--save-hf", f"{tmp_path}/hf/{{step:04d}}-{{rollout_id}}")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["0002-1"]
