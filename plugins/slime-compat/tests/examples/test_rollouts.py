"""Files as users have them who began with an example of the reference system: they run unchanged."""

from __future__ import annotations

import json

import pytest

GENERATE, REWARD = "--custom-generate-function-path", "--custom-rm-path"
ONE = ("--num-rollout", "1")


def test_search_between_turns_over_text(train):
    run = train(GENERATE, "search_turns.generate", REWARD, "search_turns.reward_func", *ONE)
    samples = run.samples()
    assert len(samples) == 16 and any(sample["environment_spans"] for sample in samples)
    for sample in samples:
        assert sample["response_length"] == len(sample["loss_mask"])
        assert len(sample["response"]) == sample["response_length"] or sample["loss_mask"] == [0]
        assert sample["reward"] == float(sample["label"] in sample["response"])
        spans = [place for begin, end in sample["environment_spans"] for place in range(begin, end)]
        assert [place for place, one in enumerate(sample["loss_mask"]) if not one] == spans


def test_a_mask_that_was_taken_before_tokens_were_appended_grows_with_them(train):
    run = train(
        GENERATE, "code_turns.generate", REWARD, "code_turns.reward_func", "--reward-key", "score", *ONE
    )
    for sample in run.samples():
        assert sample["loss_mask"].count(0) == 2 and len(sample["environment_spans"]) == 2
        assert sample["rollout_log_probs"].count(0.0) == 2
        # Of two calls and no boxed answer: -1 + (2 - 2) / 2 * 0.1, and at most -0.6.
        assert sample["reward"] == {"score": -1.0, "acc": False, "pred": ""}


def test_agents_that_copy_args_and_set_more_of_it(train):
    flags = [GENERATE, "agents_of_one_prompt.generate_with_multi_agents", "--rollout-max-context-len", "16"]
    samples = train(*flags, *ONE).samples()
    assert len(samples) == 16 * 3
    by_execution = {}
    for sample in samples:
        by_execution.setdefault(sample["rollout_id"], []).append(sample)
    assert len(by_execution) == 16
    for siblings in by_execution.values():
        assert sorted(one["reward"] for one in siblings if one["reward"] in (0.0, 0.5, 2.0)) == sorted(
            one["reward"] for one in siblings
        )
        assert max(len(one["prompt"]) for one in siblings) > 1


def test_a_result_becomes_a_sample_with_a_number_of_its_own(train):
    samples = train(GENERATE, "service_desk.generate", *ONE).samples()
    assert [sample["index"] for sample in samples] == list(range(16))
    assert [sample["group_index"] for sample in samples] == [place // 4 for place in range(16)]
    assert all(sample["metadata"]["turns"] == 2 and sample["reward"] in (0.0, 1.0) for sample in samples)
    assert all(sample["loss_mask"].count(0) == 2 for sample in samples)


def test_a_pool_of_groups_in_a_thread_goes_on_over_the_steps(train):
    flags = ["--rollout-function-path", "pool_of_groups.generate_rollout_fully_async", "--num-rollout", "3"]
    run = train(*flags, "--run-name", "pool")
    samples = run.samples()
    assert len(samples) == 3 * 16 and all(sample["reward"] is not None for sample in samples)
    assert len({sample["group_index"] for sample in samples}) == 12


def test_a_pool_asks_the_filter_and_counts_what_it_drops(train):
    flags = ["--rollout-function-path", "pool_of_groups.generate_rollout_fully_async", "--num-rollout", "1"]
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    run = train(*flags, "--dynamic-sampling-filter-path", path, "--run-name", "filtered")
    assert all(
        len({sample["reward"] for sample in run.samples() if sample["group_index"] == group}) > 1
        for group in {sample["group_index"] for sample in run.samples()}
    )
    dropped = [value for name, value in run.rows[-1].items() if "dynamic_filter/drop_zero_std" in name]
    assert dropped and all(value >= 1 for value in dropped)


def test_an_environment_of_a_module_that_the_configuration_names(train):
    custom = json.dumps({"rollout_interaction_env_path": "environment_of_letters", "max_turns": 3})
    samples = train(GENERATE, "environment_turns.generate", "--compat-custom-config", custom, *ONE).samples()
    assert {len(sample["environment_spans"]) for sample in samples} <= {0, 1, 2}
    for sample in samples:
        assert len(sample["rollout_log_probs"]) == sample["response_length"] == len(sample["loss_mask"])
        said = sample["response"].replace("r", "w").split("w")
        right = [one == sample["label"] for one in said if one]
        assert not any(right[:-1])  # it ends where an answer is right


def test_a_reward_by_a_process_gives_several_values_and_writes_to_the_sample(train):
    flags = [REWARD, "proofs.reward_fn", "--reward-key", "reward_value", "--compat-reference-metrics"]
    run = train(*flags, "--compat-log-reward-category", "reward_cat", *ONE)
    for sample in run.samples():
        assert sample["metadata"]["verdict"] == {
            "ok": "b" in sample["response"],
            "errors": sample["response"].count("a"),
        }
        assert sample["reward"]["reward_value"] == float("b" in sample["response"])
    row, right = run.rows[-1], sum("b" in sample["response"] for sample in run.samples()) / 16
    assert row["rollout/error_cat/success"] == right and row["rollout/error_cat/error"] == 1 - right
    assert row["rollout/total_lengths"] == row["rollout/response_lengths"] + 1  # of each prompt
    assert row["rollout/truncated"] == row["rollout/truncated_ratio"] and row["rollout/rollout_log_probs"] < 0


def test_rewards_by_task_and_logs_by_task(train, letters):
    rows = [{"input": "a", "label": "b", "metadata": {"rm_type": task}} for task in ("own", "f1", "math")]
    (letters.parent / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = ["--eval-interval", "1", "--eval-prompt-data", "tasks", str(letters.parent / "tasks.jsonl")]
    held += ["--n-samples-per-eval-prompt", "2", "--eval-temperature", "1"]
    run = train(
        REWARD, "tasks.route", "--custom-eval-rollout-log-function-path", "tasks.log_eval", *held, *ONE
    )  # fmt: skip
    samples = run.samples("eval_step_000001")
    assert len(samples) == 6
    for sample in samples:
        if sample["metadata"]["rm_type"] == "own":
            assert sample["reward"] == float(sample["response"] == "b")
    mean = sum(sample["response_length"] for sample in samples) / 6
    row = run.rows[-1]
    assert row["eval/tasks/len/mean"] == pytest.approx(mean)
    assert {"eval/tasks-own-pass@1", "eval/tasks-own-pass@2"} <= set(row)


def test_a_library_that_blocks_asks_from_a_thread_by_a_client_and_by_post(train):
    samples = train(GENERATE, "threads.generate", *ONE).samples()
    assert all(len(sample["rollout_log_probs"]) == sample["response_length"] >= 2 for sample in samples)


@pytest.mark.parametrize("partial", [(), ("--partial-rollout",)])
def test_the_default_loop_as_a_user_has_changed_it(train, partial):
    flags = ["--rollout-function-path", "default_loop.generate_rollout", "--over-sampling-batch-size", "6"]
    run = train(*flags, *partial, "--num-rollout", "2")
    samples = run.samples()
    assert len(samples) == 2 * 16 and all(sample["reward"] is not None for sample in samples)
    assert {sample["status"] for sample in samples} <= {"completed", "truncated"}
    assert all(row["rollout/seen"] >= 4 for row in run.rows if "rollout/seen" in row)
