"""`slime simulate` and `slime plan` as they are typed: what they print, and what they refuse."""

from __future__ import annotations

import json

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_simulator.cli.plan import main as plan
from slime_simulator.cli.simulate import main as simulate

SMALL_STEP = ["--rollout-batch-size", "4", "--rollout-max-response-len", "8"]
SMALL = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "2", "--steps", "4", "--gpus", "8"]


def test_the_loops_stand_beside_each_other(capsys):
    assert simulate([*SMALL, "--max-staleness", "2", "--no-limits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["loops"]
    assert list(found) == ["sync, shared GPUs", "sync", "one-step-off", "fully-async"]
    assert {each["samples"] for each in found.values()} == {4 * 8 * 2}
    assert [each["staleness_max"] for each in found.values()] == [0, 0, 1, 2]
    for each in found.values():
        assert each["samples_per_s"] * each["wall_s"] == pytest.approx(each["samples"])
        assert 0 <= each["engine_idle"] < 1
        assert 0 < each["trainer_idle"] < 1


def test_a_limit_on_tokens_is_one_of_the_trace_and_not_of_ids(capsys):
    """Four responses of 2 tokens at most are one sample of 4 ids."""
    words = [
        "--loops",
        "sync",
        "--n-samples-per-prompt",
        "4",
        "--rollout-max-response-len",
        "2",
        "--prompt-tokens",
        "5",
    ]
    given = [
        "--rollout-batch-size",
        "8",
        "--steps",
        "2",
        "--gpus",
        "4",
        "--median-tokens",
        "9",
        "--p99-tokens",
        "10",
    ]
    assert simulate([*given, *words, "--no-limits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loops"]["sync"]["tokens"] == 2 * 8 * 4 * (5 + 2)


def test_the_table_says_what_limits(capsys):
    words = ["--loops", "sync", "--median-tokens", "2000", "--p99-tokens", "15000"]
    assert simulate([*SMALL, *words]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "costs of qwen2.5-7b on h100 by data sheet; responses of 2,000 tokens in the median, 15,000 at the 99th"
    )
    assert "sync: limited by the longest responses (cut at the 95th percentile" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [([], " (not of the recipe's smollm2-135m: give --model); "), (["--model=qwen2.5-7b"], "; ")],
)
def test_costs_are_not_taken_for_those_of_a_recipes_model(capsys, tmp_path, words, says):
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        '[model]\nhf_checkpoint = "smollm2-135m"\n[rollout]\nrollout_batch_size = 8\nn_samples_per_prompt = 2\n'
        'rollout_max_response_len = 64\n[data]\nprompt_data = ["none"]\n'
    )
    given = [
        "--steps",
        "2",
        "--gpus",
        "4",
        "--loops",
        "sync",
        "--median-tokens",
        "9",
        "--p99-tokens",
        "30",
        "--no-limits",
    ]
    assert simulate([str(recipe), *given, *words]) == 0
    assert capsys.readouterr().out.startswith(
        f"costs of qwen2.5-7b on h100 by data sheet{says}responses of 9 tokens"
    )


def test_a_plan_is_of_flags_that_slime_train_takes(capsys):
    assert plan([*SMALL, "--staleness", "1", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    times = [each["wall_s"] for each in found["plans"]]
    assert times == pytest.approx(sorted(times), rel=0.03)
    for each in found["plans"]:
        flags = each["flags"].split()
        at = flags.index(
            "--rollout-num-gpus"
        )  # of slime-sglang, which is not installed with this package alone
        del flags[at : at + 2]
        needed = ["--hf-checkpoint", "x", "--rollout-batch-size", "8", "--rollout-max-response-len", "9"]
        assert (
            load_settings([], [*needed, *flags], registry=Registry.from_environment()).run.loop
            == each["loop"]
        )


@pytest.mark.parametrize(
    ("command", "words", "why"),
    [
        (simulate, ["--gpus", "1"], "--gpus: found 1; wanted at least 2"),
        (simulate, ["--gpus", "4", "--trainer-gpus", "4"], "too few for one replica"),
        (simulate, ["--gpus", "4", "--trainer-gpus", "0"], "--trainer-gpus: found 0; wanted at least 1"),
        (
            simulate,
            ["--update-weights-interval", "4", "--max-staleness", "2", "--no-limits"],
            "no prompt could be admitted",
        ),
        (simulate, ["--from-run", "no-such-folder"], "without a step that is recorded"),
        (simulate, ["--rollout-bach-size", "4"], "rollout-batch-size"),
        (simulate, ["--from-run", "x", "--model", "qwen2.5-7b"], "--model: found it with --from-run"),
        (simulate, ["--engine-scale=2"], "--engine-scale: found it without --from-run"),
        (simulate, ["--preset", "laminar-1024", "--gpus", "7"], "also --gpus; wanted --preset alone, or"),
        (simulate, ["--p99-tokens", "10"], "at least the median"),
        (simulate, ["--median-tokens", "nan"], "--median-tokens: found nan; wanted at least 1"),
        (
            simulate,
            ["--p99-tokens", "inf"],
            "--p99-tokens: found inf; wanted at least the median, 2000, and below",
        ),
        (simulate, ["--prompt-tokens", "3000000000"], "--prompt-tokens: found 3000000000; wanted below"),
        (plan, ["--gpus", "1000000000"], "--gpus: found 1000000000; wanted at most 100,000"),
        (plan, ["--gpus", "8", "--gpus-per-replica", "8"], "a replica, and one that trains"),
    ],
)
def test_what_cannot_be_simulated_is_refused(command, words, why):
    with pytest.raises(ConfigError, match=why):
        command(words)


def test_a_plan_of_memory_simulates_nothing(capsys, tmp_path):
    """Without a trainer and an engine nothing takes memory."""
    words = [
        "--hf-checkpoint",
        str(tmp_path),
        "--train-backend",
        "none",
        "--rollout-engine",
        "none",
        "--device-memory-gb",
        "80",
    ]
    assert plan(["--memory", *SMALL_STEP, *words]) == 0
    assert "on GPUs of 80.0 GiB; samples of at most 1032 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--update-weights-interval", "2", "--max-staleness", "1"], ["--max-staleness", "0"]]
)
def test_a_plan_tries_the_loops_whatever_bound_a_recipe_has(capsys, words):
    """The bound is one of what is tried in fully-async, and one step off has its own."""
    assert plan([*SMALL, "--gpus", "4", "--staleness", "1", *words, "--best", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert {each["loop"] for each in found} == {"sync", "one-step-off", "fully-async"}


def test_a_reward_with_parts_is_simulated_as_any_other(capsys):
    words = ["--loops", "sync", "--median-tokens", "9", "--p99-tokens", "30", "--no-limits", "--json"]
    found = []
    for key in ([], ["--reward-key", "acc"]):
        assert simulate([*SMALL, *words, *key]) == 0
        found.append(json.loads(capsys.readouterr().out)["loops"])
    assert found[0] == found[1]


def test_a_plan_leaves_out_bounds_under_which_weights_are_sent_too_seldom(capsys):
    words = ["--gpus", "4", "--update-weights-interval", "2", "--staleness", "0", "1"]
    assert plan([*SMALL, *words, "--json"]) == 0
    assert "max-staleness 0" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no prompt could be admitted"):
        plan([*SMALL, *words[:-1]])
