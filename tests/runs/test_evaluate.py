"""`slime eval`: whose weights it takes, the folder that it leaves, and its name."""

from __future__ import annotations

import json

import pytest
from slime_core.cli.evaluate import evaluation_name
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry

from .test_loop import rows, train


def test_a_model_is_evaluated_without_a_trainer_and_a_run_is_not(slime, letters):
    assert train(letters, "--num-rollout", "4")["eval_before"] == pytest.approx(0.1, abs=0.1)
    flags = ["eval", letters, "--train-backend", "none"]
    result = slime(*flags)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["eval/letters"] == pytest.approx(0.1, abs=0.1)
    refused = slime(*flags, "--load", letters.parent / "runs/letters")
    assert refused.returncode == 2
    assert "train_backend is none, which loads no checkpoint; drop --load" in refused.stderr


def test_an_evaluation_has_a_folder_of_its_own_named_after_the_run(slime, letters, tmp_path):
    train(letters, "--run-name", "alphabet", "--num-rollout", "4")
    for name in ("alphabet-eval", "alphabet-eval-2"):
        done = slime("eval", letters, "--load", tmp_path / "runs/alphabet")
        assert done.returncode == 0, done.stderr
        assert f"results in {tmp_path}/runs/{name}" in done.stderr
        folder = tmp_path / "runs" / name
        (row,) = rows(folder)
        assert row == {"step": 4} | {
            k: v for k, v in json.loads(done.stdout).items() if not k.startswith("perf/")
        }
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("completed", 4)
        assert summary["accuracy"] == row["eval/letters-pass@1"]
        assert summary["evaluates"] == str(tmp_path / "runs/alphabet")
        assert len((folder / "rollouts/eval_step_000004.jsonl").read_text().splitlines()) == 10
    assert not (tmp_path / "runs/letters-eval").exists()


def test_an_evaluation_takes_a_runs_weights_whatever_the_training_data_is(slime, letters, tmp_path):
    summary = train(
        letters, "--num-rollout", "4", "--eval-prompt-data", "letters", str(tmp_path / "letters.jsonl")
    )
    (tmp_path / "three.jsonl").write_text("".join(f'{{"input": "{a}", "label": "x"}}\n' for a in "abc"))
    other = [
        "--prompt-data",
        tmp_path / "three.jsonl",
        "--eval-prompt-data",
        "letters",
        tmp_path / "letters.jsonl",
    ]
    load = ["--load", tmp_path / "runs/letters"]
    done = slime("eval", letters, *other, *load)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval/letters-pass@1"] == summary["eval_after"]
    trained = slime("train", letters, *other, *load, "--run-name", "other")
    assert trained.returncode == 2
    assert "resume with the data set" in trained.stderr


def test_an_evaluation_is_of_the_checkpoint_also_where_no_update_would_be_due(slime, letters, tmp_path):
    """Step 3 is no multiple of the interval, nor the last, nor one that training would evaluate."""
    train(
        letters,
        *["--num-rollout", "4", "--save-interval", "1", "--keep-checkpoints", "4", "--eval-interval", "1"],
    )
    trained = {row["step"]: row["eval/letters-pass@1"] for row in rows(tmp_path / "runs/letters")}
    assert trained[3] > trained[0] + 0.2
    flags = [
        "--num-rollout",
        "4",
        "--eval-interval",
        "4",
        "--update-weights-interval",
        "2",
        "--max-staleness",
        "1",
    ]
    done = slime("eval", letters, "--load", tmp_path / "runs/letters/checkpoints/step_000003", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval/letters-pass@1"] == trained[3]


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (None, "letters-eval"),
        ("runs/x", "x-eval"),
        ("runs/x/checkpoints", "x-eval"),
        ("runs/x/checkpoints/step_000002", "x-eval"),
        ("runs/two/grpo/checkpoints/step_000002", "two/grpo-eval"),
        ("runs/two/grpo", "two/grpo-eval"),
        ("elsewhere/y", "y-eval"),
    ],
)
def test_an_evaluations_folder_is_named_after_what_it_evaluates(letters, tmp_path, load, name):
    flags = [] if load is None else ["--load", str(tmp_path / load)]
    settings = load_settings([str(letters)], flags, registry=Registry())
    assert evaluation_name(settings) == name
    (tmp_path / "runs" / name).mkdir(parents=True)
    assert evaluation_name(settings) == f"{name}-2"
    anew = load_settings([str(letters)], [*flags, "--overwrite"], registry=Registry())
    assert evaluation_name(anew) == name
