"""How a run goes on that was completed, ended by an error or killed."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from datetime import date

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import RewardError
from slime_core.launch.local import drive
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble

from .test_loop import prompts, rows, train


def test_a_run_that_fails_completes_the_checkpoint_that_it_is_writing(letters, tmp_path):
    class Fault:
        @hookimpl
        def slime_rollout_end(self, step):
            if step == 5:
                raise RuntimeError("after the save of step 4, before anyone asks whether it is written")

    registry = Registry()
    registry.hook_manager.register(Fault())
    settings = load_settings([str(letters)], ["--async-save"], registry=registry)

    async def main() -> None:
        await drive(await assemble(settings, registry))

    with pytest.raises(RuntimeError, match="after the save"):
        asyncio.run(main())
    assert [p.name for p in (tmp_path / "runs/letters/checkpoints").iterdir()] == ["step_000004"]


def test_completed_run_is_left_as_it_is(letters, tmp_path):
    summary = train(letters)
    before = (tmp_path / "runs/letters/metrics.jsonl").read_bytes()
    assert train(letters) == summary
    assert (tmp_path / "runs/letters/metrics.jsonl").read_bytes() == before


def test_longer_run_goes_on_from_the_last_checkpoint(letters, tmp_path):
    whole = train(letters, "--run-name", "whole")
    train(letters, "--num-rollout", "8")
    resumed = train(letters, "--num-rollout", "12")
    assert resumed["eval_after"] == whole["eval_after"]
    steps = {row["step"]: row for row in rows(tmp_path / "runs/whole")}
    for row in rows(tmp_path / "runs/letters"):
        shared = steps[row["step"]]
        assert {k: v for k, v in row.items() if not k.startswith("eval/")} == {
            k: v for k, v in shared.items() if not k.startswith("eval/")
        }


def test_a_run_goes_on_from_a_checkpoint_that_was_put_aside_when_it_was_killed(letters, tmp_path):
    """As a kill between the two renames of a step that is saved again leaves it: nothing else in the folder is a checkpoint."""
    train(letters, "--num-rollout", "4")
    run = tmp_path / "runs/letters"
    before = (run / "metrics.jsonl").read_text().splitlines()
    folder = run / "checkpoints"
    shutil.copytree(folder / "step_000004", folder / ".tmp_step_000004")
    (folder / "step_000004").rename(folder / ".old_step_000004")
    train(letters, "--num-rollout", "8")
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in after] == list(range(9))
    assert after[:5] == before  # the times, too: none of these steps was run again
    assert sorted(path.name for path in folder.iterdir()) == ["step_000004", "step_000008"]


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Flags of a reward that raises for samples from 128 on, which are of the third step, until the file `mended` is there."""
    (tmp_path / "faulty.py").write_text(
        "from pathlib import Path\n"
        "from slime_core.testing.tabular import next_letter\n"
        "async def reward(sample):\n"
        "    assert sample.index < 128 or Path('mended').exists()\n"
        "    return next_letter(sample)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return ("--custom-rm-path", "faulty:reward", "--rm-type", "none")


def test_a_run_that_a_reward_ends_saves_what_was_trained_and_goes_on(letters, tmp_path, faulty):
    """Nothing was to be saved before the last step."""
    flags = (*faulty, "--save-interval", "none")
    whole = train(letters, "--run-name", "whole")
    with pytest.raises(RewardError):
        train(letters, *flags)
    run = tmp_path / "runs/letters"
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_000002"]
    (tmp_path / "mended").touch()
    assert train(letters, *flags)["eval_after"] == whole["eval_after"]
    assert prompts(run) == prompts(tmp_path / "runs/whole")


def test_a_run_whose_error_lost_what_was_generated_ahead_goes_on_exactly_from_the_step_before(
    letters, tmp_path, faulty
):
    """The error is of the third step, which is generated beside the second: with that one saved, the third would be of other weights."""
    flags = ("--loop", "one-step-off", "--save-interval", "1", "--lr", "1.0", "--num-rollout", "6")
    train(letters, "--run-name", "whole", *flags)
    with pytest.raises(RewardError):
        train(letters, *faulty, *flags)
    run = tmp_path / "runs/letters"
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_000001"]
    (tmp_path / "mended").touch()
    train(letters, *faulty, *flags)
    assert rows(run) == rows(tmp_path / "runs/whole")


def test_a_run_that_goes_on_another_day_has_the_prompts_of_its_first(letters, root, tmp_path, monkeypatch):
    """Templates of Llama 3.2 and gpt-oss print the day; a run that another one's checkpoint begins keeps that one's, too."""
    monkeypatch.syspath_prepend(root / "tests/plugins")

    def on(day: int, *flags: str) -> set[str]:
        class Day(date):
            @classmethod
            def today(cls) -> date:
                return date(2026, 1, day)

        monkeypatch.setattr("slime_core.run.template_day.date", Day)
        summary = train(
            letters, "--tokenizer", "letters.dated:load_tokenizer", "--apply-chat-template", *flags
        )
        samples = (tmp_path / "runs" / str(summary["run_name"]) / "rollouts").glob("step_*.jsonl")
        return {json.loads(line)["prompt"][0] for file in samples for line in file.read_text().splitlines()}

    assert on(3, "--num-rollout", "4") == {"c"}
    assert on(4, "--num-rollout", "8") == {"c"}
    assert on(5, "--num-rollout", "12", "--run-name", "later", "--load", f"{tmp_path}/runs/letters") == {"c"}
    assert on(5, "--num-rollout", "4", "--run-name", "another") == {"e"}


def test_killed_run_equals_one_that_was_not(letters, tmp_path, kill_after):
    """kill -9 three times, whenever; then the losses and prompts are those of a run that was left alone."""
    train(letters, "--run-name", "whole", "--num-rollout", "60")
    command = [
        sys.executable,
        "-m",
        "slime_core",
        "train",
        str(letters),
        "--num-rollout",
        "60",
        "--save-interval",
        "5",
    ]
    metrics = tmp_path / "runs/letters/metrics.jsonl"
    for wanted in (8, 23, 41):
        kill_after(command, metrics, wanted)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert rows(tmp_path / "runs/letters") == rows(tmp_path / "runs/whole")
    assert prompts(tmp_path / "runs/letters") == prompts(tmp_path / "runs/whole")
