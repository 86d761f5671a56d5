"""Functions that see the buffer, samples and groups of a run: what they are given, and what becomes of what they do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from slime_core.cli import main
from slime_core.errors import SampleError
from slime_core.rundir.records import read_records

from ..test_loop import rows, train

LOOPS = ["sync", "one-step-off", "fully-async"]


def samples(run: Path, kind: str = "step_") -> list[dict]:
    files = sorted((run / "rollouts").glob(f"{kind}*.jsonl"))
    return [sample for file in files for sample in read_records(file)]


def accounted(run: Path) -> Counter[int]:
    """How often each prompt is in the run's folder in the end: trained on, dropped, or in the newest checkpoint."""
    state = json.loads((sorted((run / "checkpoints").glob("step_*"))[-1] / "state.json").read_text())
    held = [entry["samples"] for entry in state["dispatcher"]["groups"]] + state["buffer"]["groups"]
    found = Counter(group[0]["group_index"] for group in held)
    for kind in ("step_", "dropped_step_"):
        for file in (run / "rollouts").glob(f"{kind}*.jsonl"):
            found.update({sample["group_index"] for sample in read_records(file)})
    return found


@pytest.mark.parametrize("loop", LOOPS)
def test_sample_hooks_see_each_sample_once_before_it_is_scored(letters, tmp_path, loop):
    hooks = ["sample_hooks:mark", "sample_hooks:mark_again"]
    flags = ["--rollout-sample-hook-path", *hooks, "--loop", loop, "--num-rollout", "4"]
    flags += ["--rollout-max-response-len", "3", "--partial-rollout", "--over-sampling-batch-size", "6"]
    train(letters, *flags)
    run = tmp_path / "runs/letters"
    seen = [sample["metadata"]["seen"] for sample in samples(run)]
    assert len(seen) == 4 * 4 * 16
    assert {json.dumps(one[1:]) for one in seen} == {'["again"]'}
    assert {tuple(one[0][1:]) for one in seen} == {(False, None)}
    assert {one[0][0] for one in seen} <= {0, 1, 2, 3}
    held_out = {json.dumps(one["metadata"]["seen"]) for one in samples(run, "eval_")}
    assert held_out == {'[[null, true, null], "again"]'}


def test_a_sample_hook_that_is_a_class_gets_its_options_and_is_closed_once(letters, tmp_path):
    args = {"sample_hooks:Counts": {"file": str(tmp_path / "seen")}}
    flags = ["--rollout-sample-hook-path", "sample_hooks:Counts", "--num-rollout", "2"]
    train(letters, *flags, "--hook-args", json.dumps(args))
    assert (tmp_path / "seen").read_text() == f"{2 * 4 * 16}\n"


def test_the_teacher_wants_its_server_before_anything_is_generated(letters, capsys):
    assert main.run(["train", str(letters), "--rollout-sample-hook-path", "teacher"]) == 2
    assert "rm.opd_teacher_url: found nothing" in capsys.readouterr().err


def test_options_of_a_sample_hook_that_is_a_function_are_refused(letters, capsys):
    flags = [
        "--rollout-sample-hook-path",
        "sample_hooks:mark",
        "--hook-args",
        '{"sample_hooks:mark": {"n": 1}}',
    ]
    assert main.run(["train", str(letters), *flags]) == 2
    assert "rollout.hook_args.sample_hooks:mark" in capsys.readouterr().err


def test_a_sample_filter_keeps_samples_from_training_and_the_reason_is_recorded(letters, tmp_path):
    train(letters, "--rollout-sample-filter-path", "sample_hooks:no_evens", "--num-rollout", "2")
    run = tmp_path / "runs/letters"
    for sample in samples(run):
        reason = {0: "fourth", 2: "sample_filter"}.get(sample["index"] % 4)
        assert (sample["remove_sample"], sample["metadata"].get("removed_reason")) == (bool(reason), reason)
    for row in rows(run)[1:]:
        assert row["rollout/sample_filter/removed_fourth"] == 4 * 16 / 4
        assert row["rollout/sample_filter/removed_sample_filter"] == 4 * 16 / 4
        assert row["rollout/samples"] == 4 * 16


def test_a_sample_filter_that_changes_the_groups_is_refused(letters):
    with pytest.raises(SampleError, match=r"--rollout-sample-filter-path\) changed the groups; wanted"):
        train(letters, "--rollout-sample-filter-path", "sample_hooks:fewer")


def test_a_sample_hook_that_changes_an_index_is_refused(letters):
    with pytest.raises(SampleError, match="sample_hooks:another: index was 0 and came back as 1"):
        train(letters, "--rollout-sample-hook-path", "sample_hooks:another", "--eval-interval", "none")


@pytest.mark.parametrize("loop", LOOPS)
def test_all_groups_of_a_step_are_shown_and_prompts_that_are_taken_are_accounted_for(letters, tmp_path, loop):
    args = {"sample_hooks:tell_all": {"folder": str(tmp_path), "more": 1}}
    flags = ["--rollout-all-samples-process-path", "sample_hooks:tell_all", "--hook-args", json.dumps(args)]
    flags += [
        "--dynamic-sampling-filter-path",
        "sample_hooks:equal_is_weak",
        "--filter-args",
        '{"weak": false}',
    ]
    train(letters, *flags, "--num-rollout", "3", "--loop", loop)
    run = tmp_path / "runs/letters"
    told = [
        json.loads(f"[{line.replace('] [', '], [')}]")
        for line in (tmp_path / "all.txt").read_text().splitlines()
    ]
    shown = [index for seen, _ in told for index in seen]
    dropped = {sample["group_index"] for sample in samples(run, "dropped_step_")}
    trained = {sample["group_index"] for sample in samples(run)}
    assert len(told) == 3
    assert all(len(taken) == 1 for _, taken in told)
    assert len(shown) == len(set(shown))
    assert trained <= set(shown) <= trained | dropped
    found = accounted(run)
    assert set(found) == set(range(max(found) + 1))
    assert set(found.values()) == {1}
    assert sum(row.get("rollout/dynamic_filter/drop_taken_by_hook", 0) for row in rows(run)) == 3


def test_a_buffer_filter_chooses_what_is_next_and_what_it_throws_away_is_recorded(letters, tmp_path):
    flags = ["--rollout-batch-size", "2", "--over-sampling-batch-size", "7", "--num-rollout", "6"]
    train(letters, *flags, "--buffer-filter-path", "sample_hooks:newest_first")
    run = tmp_path / "runs/letters"
    # Of the first seven 2 to 6 are left over. Step 2 takes 6 of them and six new ones, and throws 2 away.
    trained = [
        sorted({sample["group_index"] for sample in read_records(run / f"rollouts/step_{n:06}.jsonl")})
        for n in (1, 2)
    ]
    assert trained == [[0, 1], [6, 7]]
    (thrown,) = {sample["group_index"] for sample in read_records(run / "rollouts/dropped_step_000002.jsonl")}
    assert thrown == 2
    assert rows(run)[2]["rollout/dynamic_filter/drop_buffer_filter"] == 1.0
    found = accounted(run)
    assert set(found) == set(range(max(found) + 1))
    assert set(found.values()) == {1}


def test_pop_first_is_what_happens_without_a_buffer_filter(letters, tmp_path):
    flags = ["--rollout-batch-size", "2", "--over-sampling-batch-size", "7", "--num-rollout", "4"]
    train(letters, *flags, "--run-name", "without")
    train(letters, *flags, "--run-name", "with", "--buffer-filter-path", "pop-first")
    assert rows(tmp_path / "runs/without") == rows(tmp_path / "runs/with")


def test_a_buffer_filter_must_take_out_what_it_returns(letters):
    flags = ["--over-sampling-batch-size", "7", "--buffer-filter-path", "sample_hooks:returns_what_it_leaves"]
    with pytest.raises(SampleError, match="returned 3 groups, 3 of which it left in the buffer"):
        train(letters, *flags)


@pytest.mark.parametrize("weak", [True, False])
def test_a_weak_reason_keeps_a_group_where_another_wave_would_be_needed(letters, tmp_path, weak):
    flags = ["--over-sampling-batch-size", "6", "--num-rollout", "1", "--eval-interval", "none"]
    args = json.dumps({"weak": weak})
    train(
        letters, *flags, "--dynamic-sampling-filter-path", "sample_hooks:equal_is_weak", "--filter-args", args
    )
    run = tmp_path / "runs/letters"
    trained = sorted({sample["group_index"] for sample in samples(run)})
    dropped = sorted({sample["group_index"] for sample in samples(run, "dropped_step_")})
    # In the order of prompts 0..5: 1 and 3 can be dropped (5, then 4 are left), 5 cannot: three would be left for four.
    assert (trained, dropped) == (([0, 2, 4, 5], [1, 3]) if weak else ([0, 2, 4, 6], [1, 3, 5]))
    (row,) = rows(run)
    assert row.get("rollout/dynamic_filter/kept_odd") == (1.0 if weak else None)
    despite = {sample["group_index"] for sample in samples(run) if "kept_despite" in sample["metadata"]}
    assert despite == ({5} if weak else set())


def test_log_functions_take_the_place_of_the_metrics(letters, tmp_path):
    args = {"sample_hooks:log_rollout": {"folder": str(tmp_path)}}
    flags = [
        "--custom-rollout-log-function-path",
        "sample_hooks:log_rollout",
        "--hook-args",
        json.dumps(args),
    ]
    flags += ["--custom-eval-rollout-log-function-path", "sample_hooks:log_evaluation", "--num-rollout", "2"]
    summary = train(letters, *flags)
    assert (tmp_path / "log.txt").read_text() == "0 64 True True\n1 64 True True\n"
    assert not [
        key for row in rows(tmp_path / "runs/letters") for key in row if key.startswith(("rollout/", "eval/"))
    ]
    assert summary["eval_after"] is not None


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--buffer-filter-path", "sample_hooks:fewer"], "one that can be called as (args, rollout_id, buffer, num_samples"),
        (["--rollout-sample-filter-path", "sample_hooks:mark_again"], "an async function; wanted a plain one"),
        (["--hook-args", '{"sample_hooks:fewer": {"a": 1}}'], "the name of a function that takes options: none is chosen"),
        (
            ["--rollout-all-samples-process-path", "sample_hooks:tell_all"],
            "rollout.hook_args.sample_hooks:tell_all: tell_all needs the option 'folder'",
        ),
        (["--rollout-sample-hook-path", "sample_hooks:mark", "sample_hooks:fewer"], "rollout.rollout_sample_hook_path"),
    ],
)  # fmt: skip
def test_check_refuses_what_cannot_be_called(letters, capsys, flags, told):
    assert main.run(["check", str(letters), *flags]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
