"""Functions that see groups, samples and the buffer: theirs do in our runs what they do there."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from slime_compat.adapters.rewards import ReferencePostProcess, ReferenceReward
from slime_compat.views.samples.sample import viewed
from slime_core.config.functions import run_args
from slime_core.config.load import load_settings
from slime_core.data.buffers import groups_from_json, groups_to_json
from slime_core.errors import ConfigError, PluginError, RewardError
from slime_core.plugins.registry import Registry
from slime_core.samples import Sample

FILTER = "--dynamic-sampling-filter-path"


def test_a_dapo_filter_drops_groups_of_equal_rewards_and_names_why(train):
    run = train(FILTER, "group_hooks.dapo_filter", "--num-rollout", "2")
    kept = {}
    for sample in run.samples():
        kept.setdefault(sample["group_index"], set()).add(sample["reward"])
    assert len(kept) == 2 * 4 and all(len(rewards) > 1 for rewards in kept.values())
    dropped = {}
    for sample in run.samples("dropped_step_"):
        dropped.setdefault(sample["group_index"], set()).add(sample["reward"])
    assert dropped and all(len(rewards) == 1 for rewards in dropped.values())
    assert sum(row.get("rollout/dynamic_filter/drop_zero_std_0.0", 0) for row in run.rows) > 0


def test_a_filter_may_answer_with_a_bool(train):
    run = train(FILTER, "group_hooks:bool_filter", "--num-rollout", "1")
    rewards = {}
    for sample in run.samples():
        rewards.setdefault(sample["group_index"], []).append(sample["reward"])
    assert all(max(each) > 0 for each in rewards.values())


def test_a_filter_that_answers_otherwise_is_refused_by_its_name(train):
    wanted = r"group_hooks:number_filter: returned float '1.5'; wanted DynamicFilterOutput \| bool"
    with pytest.raises(PluginError, match=wanted):
        train(FILTER, "group_hooks.number_filter")


def test_a_buffer_filter_chooses_what_is_generated_next(train):
    flags = ["--buffer-filter-path", "group_hooks.newest_first", "--over-sampling-batch-size", "6"]
    run = train(*flags, "--rollout-in-completion-order")
    assert any(sample["metadata"].get("from_buffer") for sample in run.samples())


def test_hooks_see_samples_of_their_own_class(train):
    flags = ["--rollout-sample-hook-path", "group_hooks.sample_hook"]
    flags += ["--rollout-sample-filter-path", "group_hooks.sample_filter"]
    flags += ["--rollout-all-samples-process-path", "group_hooks.all_samples"]
    run = train(*flags, "--num-rollout", "2")
    assert {json.dumps(one["metadata"]["seen"]) for one in run.samples()} == {
        "[0, false, true]",
        "[1, false, true]",
    }
    assert [one["remove_sample"] for one in run.samples()] == [True, False] * 16
    assert (run.folder.parent / "seen.txt").read_text() == "4\n4\n"


def test_log_functions_take_the_place_of_trackers_where_they_say_so(train, letters):
    flags = ["--custom-rollout-log-function-path", "group_hooks.rollout_log"]
    flags += ["--custom-eval-rollout-log-function-path", "group_hooks.eval_log"]
    data = str(letters.parent / "letters.jsonl")
    run = train(*flags, "--eval-interval", "1", "--eval-prompt-data", "held", data, "--num-rollout", "1")
    (line,) = map(json.loads, (run.folder.parent / "log.jsonl").read_text().splitlines())
    assert line == {"rollout_id": 0, "samples": 16, "first": "slime_compat.views.samples.sample"}
    assert not any(name.startswith("rollout/raw") for name in run.rows[-1])
    told = [json.loads(one)["held"] for one in (run.folder.parent / "eval.jsonl").read_text().splitlines()]
    assert [round(row["eval/held"] * 10) for row in run.rows] == told


def test_rewards_are_post_processed_by_a_function_of_all_samples(train):
    run = train("--custom-reward-post-process-path", "group_hooks.post_process", "--num-rollout", "1")
    assert run.summary["status"] == "completed"


def scored(reward, settings):
    sample = viewed(Sample(index=3, tokens=[1, 2], response_length=1, metadata={"own": 1}))
    value = asyncio.run(ReferenceReward(path=f"group_hooks:{reward}", run_args=settings)(sample))
    sample.reward = value
    return sample


def test_a_reward_without_a_number_is_post_processed_after_a_resume_too(train, letters):
    flags = ["--custom-reward-post-process-path", "group_hooks.post_process_answers"]
    settings = run_args(load_settings([str(letters)], flags, registry=Registry()))
    held = json.dumps(groups_to_json([[scored("reward_without_a_number", settings)]]))
    ((sample,),) = groups_from_json(json.loads(held))
    transform = ReferencePostProcess(path="group_hooks:post_process_answers", run_args=settings)
    transform.prepare([sample])
    assert transform(np.zeros(1), np.zeros(1, np.int64)).tolist() == [3 - 0.75]
    assert (sample.reward, sample.metadata) == (0.0, {"own": 1})


def test_a_reward_that_no_checkpoint_can_hold_is_refused(train):
    flags = ["--custom-reward-post-process-path", "group_hooks.post_process_answers"]
    with pytest.raises(RewardError, match=r"returned object at \['answer'\]"):
        train("--custom-rm-path", "group_hooks.reward_that_is_no_json", *flags)


def test_a_function_converts_samples_to_training_data(train):
    run = train("--custom-convert-samples-to-train-data-path", "group_hooks.convert", "--num-rollout", "2")
    assert run.summary["status"] == "completed"


def test_a_group_reward_sees_the_group(train):
    run = train("--custom-rm-path", "group_hooks.group_reward", "--group-rm", "--num-rollout", "1")
    groups = {}
    for sample in run.samples():
        groups.setdefault(sample["group_index"], []).append((sample["response_length"], sample["reward"]))
    for group in groups.values():
        lengths = sorted(length for length, _ in group)
        assert all(reward == lengths.index(length) for length, reward in group)


def test_a_reward_for_groups_needs_the_flag_for_groups(train):
    with pytest.raises(ConfigError, match="takes a list of samples; wanted --group-rm"):
        train("--custom-rm-path", "group_hooks.group_reward")
