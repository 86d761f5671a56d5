"""What happens to the folder of a run that is there already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry
from slime_core.rundir.claim import folder_problems


def train(recipe: Path, *flags: str) -> dict[str, Any]:
    """Run four short steps, and save after them."""
    registry = Registry()
    short = ("--num-rollout", "4", "--eval-interval", "none")
    return launch(load_settings([str(recipe)], [*short, *flags], registry=registry), registry, drive)


@pytest.fixture
def run(letters: Path, tmp_path: Path) -> Path:
    """The folder of a run that is done."""
    train(letters)
    return tmp_path / "runs/letters"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_overwrite_that_is_refused_deletes_nothing(letters, run):
    before = files(run.parent)
    for flags, error, message in (
        (["--load", "runs/mistyped"], ConfigError, "runs/mistyped', which holds no checkpoint"),
        (
            ["--load", str(run)],
            ConfigError,
            f"step_000004, which --overwrite would delete; .* outside {run};",
        ),
        (
            ["--hf-checkpoint", f"{run}/checkpoints"],
            ConfigError,
            "model.hf_checkpoint: found .*points, which",
        ),
        *(
            (
                [flag, f"{run}/checkpoints/step_000004"],
                ConfigError,
                f"{where}: found .*step_000004, which --overwrite would",
            )
            for flag, where in (
                ("--actor-load", "roles.actor_load"),
                ("--ref-load", "roles.ref_load"),
                ("--critic-load", "roles.critic_load"),
                ("--opd-teacher-load", "roles.opd_teacher_load"),
                ("--media-root", "data.media_root"),
                ("--sglang-model-path", "sglang.model_path"),
            )
        ),
        (["--run-name", ""], ConfigError, "run.run_name: found ''; wanted the name of a folder below"),
        (["--run-name", "x/../letters"], ConfigError, "run.run_name: found 'x/../letters'"),
        (["--run-name", str(run)], ConfigError, "run.run_name: found '/"),
        (
            ["--run-name", "letters/rollouts"],
            ConfigError,
            "letters/rollouts, which has no config.toml; wanted",
        ),
    ):
        with pytest.raises(error, match=message):
            train(letters, "--overwrite", *flags)
        assert files(run.parent) == before


def test_folders_for_other_programs_are_apart_from_what_a_run_reads(letters, tmp_path):
    """With the step's number in the pattern's place the model's folder would be written over by the step of that number."""
    (tmp_path / "out/step_45").mkdir(parents=True)
    (tmp_path / "out/link").symlink_to("step_45")
    registry = Registry()

    def problems(*flags: str) -> list[str]:
        settings = load_settings(
            [str(letters)], [*flags, "--save-hf", f"{tmp_path}/out/step_{{step:03}}"], registry=registry
        )
        return [str(each) for each in folder_problems(settings) if "that of" in str(each)]

    for flag in ("--hf-checkpoint", "--actor-load", "--ref-load"):
        for name in ("step_45", "link"):
            (found,) = problems(flag, f"{tmp_path}/out/{name}")
            assert (
                f"out/{name}, that of " in found and "wanted folders apart from what the run reads" in found
            )
    assert problems("--actor-load", f"{tmp_path}/out/step_46") == []  # which is not there
    assert problems("--actor-load", f"{tmp_path}/out") == []


def test_overwrite_leaves_nothing_of_the_run_before(letters, run):
    (run / "reward.png").touch()
    assert train(letters, "--overwrite", "--num-rollout", "2")["steps"] == 2
    assert not (run / "reward.png").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]


def test_checkpoint_that_is_not_there_leaves_no_folder(letters, tmp_path):
    with pytest.raises(ConfigError, match="mistyped', which holds no checkpoint"):
        train(letters, "--load", str(tmp_path / "mistyped"))
    assert not (tmp_path / "runs").exists()


def test_folder_is_refused_while_another_process_has_it(letters, run):
    take = f"from slime_core.rundir.rundir import *; d = RunDir(Path({str(run)!r})); d.take(anew=False); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", take], **pipes) as other:
        other.stdout.readline()
        before = files(run)
        for flags in ([], ["--overwrite"]):
            with pytest.raises(ConfigError, match=f"letters, which process {other.pid} on .* is writing to;"):
                train(letters, *flags)
        assert files(run) == before
        other.kill()
    assert train(letters, "--overwrite")["steps"] == 4


def test_last_step_is_saved_and_only_what_is_there_is_named(slime, letters, tmp_path):
    flags = ["--num-rollout", "2", "--save-interval", "none", "--eval-interval", "none"]
    run = tmp_path / "runs/letters"
    done = slime("train", letters, *flags)
    assert done.stdout.endswith(f"results in {run}: metrics.jsonl, summary.json, rollouts/, checkpoints/\n")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    done = slime("train", letters, *flags, "--no-save-last", "--overwrite")
    assert done.stdout.endswith(f"results in {run}: metrics.jsonl, summary.json, rollouts/\n")
    assert list((run / "checkpoints").iterdir()) == []


def test_other_settings_of_a_run_that_goes_on_or_is_done_are_told(letters, run, capsys):
    config = (run / "config.toml").read_text()
    assert "lr = 40.0" in config
    train(letters, "--lr", "0.5")
    told = capsys.readouterr().err
    assert told == (
        f"warning: {run} was completed before, with other settings: train.lr 40.0 -> 0.5; nothing is trained; "
        "--overwrite starts anew\n"
    )
    assert (run / "config.toml").read_text() == config
    train(letters, "--num-rollout", "5", "--rollout-seed", "7")
    told = capsys.readouterr().err
    assert told == (
        f"warning: {run} goes on with other settings than before: run.num_rollout 4 -> 5, rollout.rollout_seed 42 -> 7\n"
    )
    assert "rollout_seed = 7" in (run / "config.toml").read_text()


def test_terminal_shows_why_rewards_fail(slime, letters, tmp_path):
    (tmp_path / "broken.py").write_text("def reward(sample):\n    raise ZeroDivisionError('nope')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    flags = ["--rm-type", "broken:reward", "--on-reward-error", "drop", "--eval-interval", "none"]
    ended = slime("train", letters, *flags, env=os.environ | {"PYTHONPATH": path})
    assert ended.returncode == 2
    first, second, third, *rest = ended.stderr.splitlines()
    assert all(line.startswith("warning: sample ") for line in (first, second, third))
    assert "nope" in first
    assert third.endswith(f"(more like it: {tmp_path}/runs/letters/log.txt)")
    assert "dropped: reward_error: 80; mend the reward, whose first failure is: sample " in rest[-1]
    assert "nope" in rest[-1]
