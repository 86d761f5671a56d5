"""`slime replay` and `slime diff` over runs of the tabular policy: recorded metrics come again, and what differs is named."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from slime_core.cli.main import run as slime
from slime_core.cli.rundir.diff import _of_samples, first_difference
from slime_core.cli.rundir.replay import _settings
from slime_core.config.derive import trackers
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.rundir.records import read_records
from slime_core.rundir.rundir import RunDir
from slime_core.samples import Sample

TABULAR = "slime_core.testing.tabular:"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of four steps, saved after the second and the fourth."""
    folder = tmp_path_factory.mktemp("letters")
    (folder / "model").mkdir()
    (folder / "letters.jsonl").write_text(
        "".join(f'{{"input": "{a}", "label": "x"}}\n' for a in "abcdefghij")
    )
    words = {
        "run-name": "letters", "output-dir": folder / "runs", "num-rollout": 4, "tracker": "jsonl", "hf-checkpoint": folder / "model",
        "tokenizer": f"{TABULAR}load_tokenizer", "prompt-data": folder / "letters.jsonl", "label-key": "label",
        "rollout-engine": f"{TABULAR}create_engine", "rollout-batch-size": 4, "n-samples-per-prompt": 4,
        "rollout-max-response-len": 3, "rm-type": f"{TABULAR}next_letter", "advantage-estimator": f"{TABULAR}credit",
        "loss-type": f"{TABULAR}reinforce", "loss-reducer": f"{TABULAR}per_token", "train-backend": f"{TABULAR}create_trainer",
        "lr": 40.0, "save-interval": 2,
    }  # fmt: skip
    assert (
        slime(["train", *(str(word) for name, value in words.items() for word in (f"--{name}", value))]) == 0
    )
    return folder / "runs/letters"


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def rewrite(run: Path, step: int, change) -> None:
    """Change the samples of a step as they are recorded."""
    path = RunDir(run).rollout_file(step)
    samples = [Sample.from_dict(row) for row in read_records(path)]
    change(samples)
    RunDir(run).write_samples(step, [samples])
    path.with_suffix(".npz").unlink()
    path.write_text("".join(json.dumps(sample.to_dict(), default=list) + "\n" for sample in samples))


def swap_reward(samples) -> None:
    """Give the sixth sample of a step the other reward of the two that there are."""
    samples[5].reward = 1.0 - samples[5].reward


def test_a_replay_tells_none_of_the_trackers_of_its_run(trained):
    was = load_settings([str(trained / "config.toml")], [], registry=Registry())
    adding = [name for name in type(was.run).model_fields if name.startswith("use_")]
    assert len(adding) >= 5
    for name in adding:
        was = was.having("run", name, True, origin="a test")
    arguments = argparse.Namespace(output=None, step=1)
    replayed = _settings(was, RunDir(trained), arguments, None, folder=trained)
    assert trackers(replayed.run) == ["jsonl"]


@pytest.mark.parametrize(("step", "where"), [(1, "from the start"), (3, "from "), (4, "steps 3 to 4")])
def test_a_recorded_step_gives_the_recorded_metrics_bit_for_bit(trained, capsys, step, where):
    assert slime(["replay", str(trained), "--step", str(step)]) == 0
    told = capsys.readouterr().out
    assert where in told and "are the recorded ones, bit for bit" in told


def test_a_replay_of_other_samples_names_the_metric_that_differs(copied, capsys):
    rewrite(copied, 3, swap_reward)
    assert slime(["replay", str(copied), "--step", "3"]) == 1
    assert "step 3: train/" in capsys.readouterr().out


def test_a_replay_compares_a_step_that_has_a_second_row_with_its_evaluation(copied, capsys):
    """As a run has that ended earlier than it was to: the second row has no metric of the trainer."""
    RunDir(copied).append_metrics(3, {"eval/letters": 0.5})
    assert slime(["replay", str(copied), "--step", "3"]) == 0
    rewrite(copied, 3, swap_reward)
    assert slime(["replay", str(copied), "--step", "3"]) == 1
    assert "step 3: train/" in capsys.readouterr().out


def test_a_step_without_metrics_of_the_trainer_is_not_replayed(copied, capsys):
    rows = [row for row in RunDir(copied).read_metrics() if row["step"] != 3]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunDir(copied).append_metrics(3, {"eval/letters": 0.5})
    assert slime(["replay", str(copied), "--step", "4"]) == 2
    assert (
        f"a step whose samples and metrics train/... are in {copied}: 3 has none" in capsys.readouterr().err
    )


def test_metrics_of_a_step_with_a_second_row_are_compared(trained, copied):
    rows = RunDir(copied).read_metrics()
    name = next(name for name in rows[2] if name.startswith("train/"))
    rows[2][name] = -5.0
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunDir(copied).append_metrics(3, {"eval/letters": 0.5})
    found = first_difference(RunDir(copied), RunDir(trained))
    assert found is not None and found.startswith(f"step 3: the samples are the same, and {name} is -5.0")


def test_a_replay_keeps_the_number_of_steps_that_rates_decay_over_and_ends_at_its_own(trained, tmp_path):
    kept = tmp_path / "again"
    assert slime(["replay", str(trained), "--step", "3", "--output", str(kept)]) == 0
    assert load_settings([str(kept / "config.toml")], [], registry=Registry()).run.num_rollout == 4
    assert [row["step"] for row in RunDir(kept).read_metrics()] == [3]
    assert [path.name for path in sorted((kept / "checkpoints").iterdir())] == ["step_000003"]
    assert RunDir(kept).read_summary()["status"] == "completed"


def test_a_replay_can_be_kept_as_a_run(trained, tmp_path):
    assert slime(["replay", str(trained), "--step", "4", "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/checkpoints/step_000004/trainer").exists()


def test_a_replay_into_a_folder_that_is_there_is_refused_and_leaves_it(trained, copied, capsys):
    """What is there would be taken for what was trained again, or be written over."""
    before = (copied / "config.toml").read_bytes()
    assert slime(["replay", str(trained), "--step", "4", "--output", str(copied)]) == 2
    assert f"--output: found {copied}; wanted a folder that is not there yet" in capsys.readouterr().err
    assert (copied / "config.toml").read_bytes() == before


def test_a_replay_deletes_no_run_whatever_its_own_was_begun_with(trained):
    was = load_settings([str(trained / "config.toml")], ["--overwrite"], registry=Registry())
    arguments = argparse.Namespace(output=None, step=1)
    assert not _settings(was, RunDir(trained), arguments, None, folder=trained).run.overwrite


def train_more(trained: Path, folder: Path, load: Path) -> Path:
    """Train two steps more with the weights of another run, in a run without a checkpoint; returns its folder."""
    flags = {
        "output-dir": folder,
        "run-name": "more",
        "load": load,
        "num-rollout": 6,
        "save-interval": "none",
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    assert slime(["train", str(trained / "config.toml"), *words, "--no-save-last"]) == 0
    return folder / "more"


def test_a_run_that_began_from_another_ones_checkpoint_is_replayed_from_there(trained, tmp_path, capsys):
    more = train_more(trained, tmp_path, trained)
    capsys.readouterr()
    assert slime(["replay", str(more), "--step", "6"]) == 0
    told = capsys.readouterr().out
    assert "trained steps 5 to 6" in told and "bit for bit" in told
    assert slime(["replay", str(more), "--step", "4"]) == 2


def test_a_replay_does_not_begin_where_another_run_is_now(trained, tmp_path, capsys):
    """It began with the other run's weights after step 2, and that one has gone on to step 4."""
    shutil.copytree(trained, tmp_path / "other")
    shutil.rmtree(tmp_path / "other/checkpoints/step_000004")
    more = train_more(trained, tmp_path, tmp_path / "other")
    shutil.copytree(trained / "checkpoints/step_000004", tmp_path / "other/checkpoints/step_000004")
    assert slime(["replay", str(more), "--step", "6"]) == 2
    assert "step_000004: found step 4; wanted that after which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "9"], "a step whose samples and metrics train/... are in"),
        (["--step", "0"], "wanted a step, 1 or more"),
        (["--step"], "expected one argument"),
    ],
)
def test_a_step_that_was_not_recorded_is_refused(trained, capsys, words, message):
    try:
        status = slime(["replay", str(trained), *words])
    except SystemExit as end:
        status = end.code
    assert status == 2 and message in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert (
        slime(["replay", str(tmp_path), "--step", "1"]) == slime(["diff", str(tmp_path), str(tmp_path)]) == 2
    )
    assert capsys.readouterr().err.count("wanted the folder of a run") == 2


def test_runs_that_are_the_same_have_no_difference(trained, copied, capsys):
    assert slime(["diff", str(trained), str(copied)]) == 0
    assert capsys.readouterr().out == "no difference in 4 steps\n"


def test_one_token_that_was_drawn_otherwise_is_named(trained, copied, capsys):
    def other(samples):
        samples[6].tokens[-2] += 1

    rows = list(read_records(RunDir(trained).rollout_file(2)))
    rewrite(copied, 2, other)
    assert slime(["diff", str(trained), str(copied)]) == 1
    was = rows[6]["tokens"][-2]
    position = rows[6]["response_length"] - 2
    assert capsys.readouterr().out == (
        f"step 2, sample {rows[6]['index']}, token {position} of the response: tokens is {was} in the first run, and {was + 1} in "
        "the second\n"
    )


def test_log_probs_rewards_samples_and_metrics_are_compared_in_this_order(trained, copied):
    def log_prob(samples):
        samples[0].rollout_log_probs = [
            float(np.nextafter(samples[0].rollout_log_probs[0], 1)),
            *samples[0].rollout_log_probs[1:],
        ]
        samples[0].reward = 7.0

    rewrite(copied, 4, log_prob)
    found = first_difference(RunDir(trained), RunDir(copied))
    assert "step 4, sample" in found and "token 0 of the response: rollout_log_probs is" in found
    rewrite(copied, 3, lambda samples: samples.pop())
    assert "only the first run has it" in first_difference(RunDir(trained), RunDir(copied))
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    name = next(name for name in rows[0] if name.startswith("train/"))
    rows[0][name] = -5.0
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = first_difference(RunDir(trained), RunDir(copied))
    assert found.startswith(f"step 1: the samples are the same, and {name} is") and "-5.0" in found
    for file in (copied / "rollouts").glob("step_000001.*"):
        file.unlink()
    found = first_difference(RunDir(trained), RunDir(copied))
    assert found is not None and "step 3, sample" in found  # steps that both have are compared


def test_a_step_that_one_run_lacks_is_a_difference(trained, copied, capsys):
    for file in (copied / "rollouts").glob("step_000004.*"):
        file.unlink()
    assert slime(["diff", str(trained), str(copied)]) == 1
    assert (
        f"{copied} has no samples of step 4, and the other has; those that both have are the same"
        in capsys.readouterr().out
    )


def test_runs_that_begin_later_are_compared_and_those_without_a_common_step_are_refused(
    trained, copied, tmp_path, capsys
):
    """As those of `--load` do, whose steps count on."""
    shutil.copytree(trained, tmp_path / "other")
    for run in (copied, tmp_path / "other"):
        for file in (run / "rollouts").glob("step_00000[12].*"):
            file.unlink()
    assert first_difference(RunDir(copied), RunDir(tmp_path / "other")) is None
    rewrite(copied, 4, lambda samples: setattr(samples[2], "reward", 9.0))
    assert "step 4, sample" in str(first_difference(RunDir(copied), RunDir(tmp_path / "other")))
    for file in (tmp_path / "other/rollouts").glob("step_00000[34].*"):
        file.unlink()
    assert slime(["diff", str(copied), str(tmp_path / "other")]) == 2
    assert (
        f"{copied} has steps 3 to 4, and {tmp_path}/other has no step; wanted runs with a step in common"
        in capsys.readouterr().err
    )


def test_log_probs_that_are_no_numbers_at_the_same_places_are_no_difference():
    """NaN equals nothing, itself included: the next difference is named."""
    one, other = (
        {"index": 0, "tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [float("nan"), -1.0], "reward": reward}
        for reward in (1.0, 2.0)
    )  # fmt: skip
    assert _of_samples(one, one | {"rollout_log_probs": [float("nan"), -1.0]}) is None
    assert _of_samples(one, other) == "sample 0: reward is 1.0 in the first run, and 2.0 in the second"
    told = _of_samples(one, other | {"rollout_log_probs": [float("nan"), -2.0]})
    assert told is not None and told.startswith(
        "sample 0, token 1 of the response: rollout_log_probs is -1.0"
    )
