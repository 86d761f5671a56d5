"""One recipe, several runs: each begins with the weights of the one before, and a kill anywhere changes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slime_core.checks.settings import check_stages
from slime_core.cli.evaluate import main as evaluate
from slime_core.config.load import load_settings, load_stages
from slime_core.errors import CheckpointError, ConfigError, RewardError
from slime_core.launch.local import drive, launch
from slime_core.launch.stages import train_stages
from slime_core.plugins.registry import Registry
from slime_core.rundir.records import read_records

STAGES = """
[stage.first]
run.num_rollout = 6
[stage.second]
run.num_rollout = 16
train.lr = 20.0
"""


@pytest.fixture
def staged(letters, tmp_path):
    """The recipe of letters in two stages."""
    recipe = tmp_path / "staged.toml"
    recipe.write_text(letters.read_text() + STAGES)
    return recipe


def train(recipe: Path, *flags: str) -> dict:
    registry = Registry()
    return train_stages(load_stages([str(recipe)], flags, registry=registry), registry)


def facts(run: Path) -> tuple[list[dict[str, float]], list[str]]:
    """The metrics of all steps without those of time, and the samples that were trained on without those of time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [
        json.dumps(sample | {"timings": None})
        for file in sorted((run / "rollouts").glob("step_*.jsonl"))
        for sample in read_records(file)
    ]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines], samples


def outcome(summary: dict) -> dict:
    """A summary without its times and names."""
    return {
        key: {name: outcome(stage) for name, stage in value.items()} if key == "stages" else value
        for key, value in summary.items()
        if key not in ("wall_s", "run_name")
    }


def test_the_second_stage_is_the_run_that_begins_with_the_weights_of_the_first(staged, letters, tmp_path):
    summary = train(staged)
    runs = tmp_path / "runs"
    first, second = summary["stages"]["first"], summary["stages"]["second"]
    assert json.loads((runs / "letters/summary.json").read_text()) == summary
    assert (summary["status"], summary["run_name"], summary["steps"]) == ("completed", "letters", 6 + 16)
    assert summary["eval_before"] == first["eval_before"] < first["eval_after"] == second["eval_before"]
    assert second["eval_before"] < second["eval_after"] == summary["eval_after"]
    assert summary["wall_s"] == first["wall_s"] + second["wall_s"]
    left, trained = (
        np.load(runs / "letters/first" / file)
        for file in ("hf/table.npy", "checkpoints/step_000006/trainer/table.npy")
    )
    assert (left == trained).all()
    registry = Registry()
    by_hand = ["--run-name", "alone", "--num-rollout", "16", "--lr", "20.0", "--hf-checkpoint", str(runs / "letters/first/hf")]  # fmt: skip
    launch(load_settings([str(letters)], by_hand, registry=registry), registry, drive)
    assert facts(runs / "letters/second") == facts(runs / "alone")


def test_a_stage_leaves_its_weights_also_where_they_are_offloaded_for_its_last_evaluation(staged, tmp_path):
    shared = ["--colocate", "--offload-train", "--no-save-last", "--save-interval", "none"]
    assert train(staged, *shared)["status"] == "completed"
    left = np.load(tmp_path / "runs/letters/first/hf/table.npy")
    train(staged, "--run-name", "alone")
    assert (left == np.load(tmp_path / "runs/alone/first/hf/table.npy")).all()


def test_the_weights_of_each_stage_are_evaluated_by_the_recipe(staged, tmp_path, capsys):
    summary = train(staged, "--num-rollout", "4")
    for name in ("first", "second"):
        assert evaluate([str(staged), "--load", str(tmp_path / "runs/letters" / name)]) == 0
        metrics = json.loads(capsys.readouterr().out)
        assert metrics["eval/letters-pass@1"] == summary["stages"][name]["eval_after"]


@pytest.mark.faults
def test_killed_in_either_stage_or_between_them_it_ends_as_if_it_had_not_been(staged, tmp_path, kill_after):
    runs = tmp_path / "runs"
    whole, killed = runs / "whole", runs / "killed"
    unbroken = train(staged, "--run-name", "whole")
    command = [sys.executable, "-m", "slime_core", "train", str(staged), "--run-name", "killed"]
    for stage, wanted in (("first", 5), ("second", 9)):
        metrics = killed / stage / "metrics.jsonl"
        kill_after(command, metrics, wanted)
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "stage first: completed: 6 steps" in ended.stdout
    what_is_left_by_a_kill = {
        "while the weights were written": ("first/summary.json", "first/hf", "second", "summary.json"),
        "after the first stage": ("second", "summary.json"),
    }
    for missing in ((), *what_is_left_by_a_kill.values()):
        for name in missing:
            path = killed / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if missing:
            train(staged, "--run-name", "killed")
        summary = json.loads((killed / "summary.json").read_text())
        assert outcome(summary) == outcome(unbroken)
        for stage in ("first", "second"):
            assert facts(killed / stage) == facts(whole / stage)


def test_a_stage_that_later_ones_began_from_is_not_changed_behind_their_backs(staged, tmp_path):
    runs = tmp_path / "runs/letters"
    short = ["--eval-interval", "none", "--set", "stage.second.run.num_rollout=3"]
    train(staged, *short)
    before = facts(runs / "second"), (runs / "summary.json").read_text()
    longer = [*short, "stage.first.run.num_rollout=8"]
    with pytest.raises(CheckpointError, match="stage first has not taken all of its 8 steps"):
        train(staged, *longer)
    assert (facts(runs / "second"), (runs / "summary.json").read_text()) == before
    summary = train(staged, *longer, "--overwrite")
    assert (summary["steps"], summary["stages"]["first"]["steps"]) == (11, 8)
    assert facts(runs / "second") != before[0]


def test_overwrite_that_would_empty_what_the_first_stage_starts_from_empties_nothing(staged, tmp_path):
    """A run of stages is written anew, and begins with weights that a later stage of it has learnt."""
    runs = tmp_path / "runs/letters"
    train(staged, "--eval-interval", "none")
    before = [facts(runs / name) for name in ("first", "second")]
    start = ["--set", f"stage.first.checkpoint.load={runs}/second"]
    with pytest.raises(
        ConfigError, match=r"checkpoint\.load: found .*second, which --overwrite would delete"
    ):
        train(staged, "--eval-interval", "none", "--overwrite", *start)
    assert [facts(runs / name) for name in ("first", "second")] == before


def test_only_the_first_stage_starts_from_a_folder_of_the_users(root):
    """Others start from the weights of the stage before."""
    registry = Registry()

    def told(*flags: str) -> list[str]:
        stages = load_stages([str(root / "recipes/sft-then-grpo.toml")], flags, registry=registry)
        return [str(each) for each in check_stages(stages, registry) if "actor_load" in str(each)]

    (problem,) = told("--actor-load", "x")
    first, second = (
        stage.name for stage in load_stages([str(root / "recipes/sft-then-grpo.toml")], [], registry=registry)
    )
    assert problem.startswith(
        f"stage {second}: roles.actor_load: found 'x'; wanted nothing: it starts from the weights of"
    )
    assert f"stage.{first}.roles.actor_load" in problem
    assert told("--set", f"stage.{first}.roles.actor_load=x") == []


def test_a_stage_that_fails_ends_the_run_and_the_summary_says_where(staged, tmp_path):
    with pytest.raises(RewardError):
        train(staged, "--set", "stage.second.reward.rm_type=math:sqrt")
    summary = json.loads((tmp_path / "runs/letters/summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"].startswith("RewardError")
    assert [stage["status"] for stage in summary["stages"].values()] == ["completed", "failed"]
    assert summary["eval_after"] == summary["stages"]["first"]["eval_after"]
