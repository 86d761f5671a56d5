"""The generator `multi-turn` in runs: conversations that are aborted and go on, rewards, settings that cannot be."""

import asyncio
import json
import re

import numpy as np
import pytest
from slime_core.checks.settings import check_settings
from slime_core.config.functions import resolve_function
from slime_core.errors import ConfigError, PluginError
from slime_core.launch.local import launch
from slime_core.loops.sync import sync
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble
from slime_core.run.start import start
from slime_core.run.tracking import attach
from slime_core.rundir.records import read_records
from slime_core.samples import Sample, Status
from slime_core.testing.contracts import check_generator
from slime_core.testing.contracts.runs import tabular_settings
from slime_core.testing.tabular import LetterTokenizer

from .conversations import Interrupted, Letters, converse, letters_engine, record_of

pytestmark = pytest.mark.timeout(120)
#: Where the environments of the tests are.
MODULE = Letters.__module__


def conversation(engine, sample=None, *, environment="Letters"):
    return converse(
        f"{MODULE}:{environment}",
        engine,
        sample or Sample(index=4, tokens=[0, 1]),
        tokenizer=LetterTokenizer(),
        environment_args={"ends": 4, "opening": "ab", "scores": True},
        max_new_tokens=120,
    )[0]


def without_times(sample):
    values = sample.to_dict()
    for name in ("timings", "non_generation_time", "weight_versions", "weight_version_starts"):
        del values[name]
    return values


@pytest.mark.parametrize("environment", ["Letters", "ForgetfulLetters"])
def test_a_conversation_that_is_aborted_anywhere_equals_one_that_is_not(environment):
    whole = conversation(letters_engine(), environment=environment)
    assert record_of(whole)["turns"] == 4
    n_begun_anew = 0
    for at in range(whole.generated_length):
        part = conversation(Interrupted(letters_engine(), at), environment=environment)
        assert (part.status, part.generated_length) == (Status.ABORTED, at)
        assert part.tokens == whole.tokens[: len(part.tokens)]
        saved = Sample.from_dict(json.loads(json.dumps(part.to_dict())))
        n_begun_anew += record_of(saved)["state"] is None
        again = conversation(letters_engine(), saved, environment=environment)
        assert without_times(again) == without_times(whole)
    assert n_begun_anew == (whole.generated_length if environment == "ForgetfulLetters" else 0)


def test_tokens_that_are_masked_as_off_policy_still_count_for_the_budget():
    part = conversation(Interrupted(letters_engine(), 5))
    part.loss_mask = [0] * part.response_length
    again = conversation(letters_engine(), part)
    whole = conversation(letters_engine())
    assert again.tokens == whole.tokens
    assert sum(again.loss_mask) == sum(whole.loss_mask) - 5


def whole_run(*flags, file="step_000002.jsonl"):
    """Run two steps over the table of letters; returns the rows of metrics and the samples of a file, the last step's."""
    registry = Registry()

    async def use(run):
        try:
            await start(run)
            attach(registry, run.trackers)
            registry.hooks.slime_run_start(run=run)
            await sync(run)
        finally:
            await run.close()
        folder = run.run_dir.path
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return rows, list(read_records(folder / "rollouts" / file))

    chosen = ("--custom-generate-function-path", "multi-turn", "--environment", f"{MODULE}:Letters")
    with tabular_settings(registry, *chosen, *flags) as settings:
        return launch(settings, registry, use)


def test_the_environments_reward_is_the_samples_where_no_other_is_chosen():
    args = json.dumps({"ends": 2, "scores": True})
    flags = ("--rm-type", "none", "--environment-args", args, "--rollout-max-response-len", "60")
    rows, samples = whole_run(*flags)
    assert any(sample["environment_spans"] for sample in samples)
    for sample in samples:
        record = sample["metadata"]["multi_turn"]
        assert sample["reward"] == record["reward"] == sum(len(one["text"]) for one in record["info"])
        ones = sample["response_length"] - record["environment_tokens"]
        mask = sample["loss_mask"] or [1] * sample["response_length"]
        assert sum(mask) == ones <= 60
        spans = sample["environment_spans"]
        masked = [at for begin, end in spans for at in range(begin, end)]
        assert [at for at, one in enumerate(mask) if not one] == masked
    last = rows[-1]
    assert last["rollout/raw_reward"] == np.mean([sample["reward"] for sample in samples])
    records = [sample["metadata"]["multi_turn"] for sample in samples]
    assert last["rollout/multi_turn/turns/mean"] == np.mean([one["turns"] for one in records])
    assert last["rollout/multi_turn/turns/max"] == max(one["turns"] for one in records)
    put_in = [one["environment_tokens"] for one in records]
    assert last["rollout/multi_turn/environment_tokens/mean"] == np.mean(put_in)
    ended = {name: value for name, value in last.items() if "ended_by" in name}
    assert sum(ended.values()) == pytest.approx(1.0)
    assert last["perf/non_generation_time/mean"] > 0


def test_an_evaluation_set_has_its_own_reward_where_training_has_the_environments(tmp_path, monkeypatch):
    (tmp_path / "own_lengths.py").write_text(
        "async def length(sample):\n    return float(len(sample.response))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "two.jsonl").write_text('{"input": "a", "label": "x"}\n{"input": "b", "label": "x"}\n')
    sets = f'[[eval.datasets]]\nname = "lengths"\npath = "{tmp_path}/two.jsonl"\n'
    sets += 'custom_rm_path = "own_lengths:length"\n'
    (tmp_path / "sets.toml").write_text(
        sets + f'[[eval.datasets]]\nname = "own"\npath = "{tmp_path}/two.jsonl"\n'
    )
    flags = ("--rm-type", "none", "--environment-args", json.dumps({"ends": 2, "scores": True}))
    flags += ("--eval-interval", "2", "--skip-eval-before-train", "--eval-config", f"{tmp_path}/sets.toml")
    _, samples = whole_run(*flags, file="eval_step_000002.jsonl")
    by_set = {
        name: [one for one in samples if one["metadata"]["source_name"] == name]
        for name in ("lengths", "own")
    }
    assert [one["reward"] for one in by_set["lengths"]] == [len(one["response"]) for one in by_set["lengths"]]
    assert [one["reward"] for one in by_set["own"]] == [
        one["metadata"]["multi_turn"]["reward"] for one in by_set["own"]
    ]
    assert all(by_set.values())


@pytest.mark.parametrize("environment", ["Letters", "ForgetfulLetters"])
def test_aborted_conversations_are_trained_on_in_a_later_step(environment):
    flags = [
        "--environment",
        f"{MODULE}:{environment}",
        "--partial-rollout",
        "--rollout-in-completion-order",
    ]
    flags += ["--over-sampling-batch-size", "6", "--rollout-max-response-len", "40", "--max-turns", "3"]
    flags += ["--environment-args", json.dumps({"ends": 3, "opening": "ab"})]
    _, samples = whole_run(*flags)
    assert len(samples) == 8
    assert any("start_rollout_id" in one["metadata"] for one in samples)
    for sample in samples:
        put_in = {at for begin, end in sample["environment_spans"] for at in range(begin, end)}
        assert [int(at not in put_in) for at in range(sample["response_length"])] == sample["loss_mask"]
        assert all(sample["rollout_log_probs"][at] == 0.0 for at in put_in)
        assert len(sample["metadata"]["multi_turn"]["info"]) == sample["metadata"]["multi_turn"]["turns"] <= 3


def test_a_reward_that_is_chosen_takes_the_place_of_the_environments():
    args = json.dumps({"ends": 2, "scores": True})
    _, samples = whole_run("--environment-args", args)
    assert {sample["reward"] for sample in samples} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--environment", f"{MODULE}:Echo"),
            "environment.environment: found .*Echo'; wanted a generator that asks it; give --custom-generate-f",
        ),
        (("--custom-generate-function-path", "multi-turn", "--environment", "calculater"), "calculator"),
        (
            ("--custom-generate-function-path", "multi-turn", "--environment", f"{__name__}:MODULE"),
            "which is str; wanted a function",
        ),
    ],
)
def test_an_environment_that_cannot_be_asked_is_found_before_the_run(flags, words):
    registry = Registry()
    with tabular_settings(registry, *flags) as settings:
        problems = [str(problem) for problem in check_settings(settings, registry)]
    assert any(re.search(words, problem) for problem in problems), problems


def test_an_environment_may_be_that_of_an_evaluation_set_alone(tmp_path):
    file = tmp_path / "sets.toml"
    file.write_text(
        '[[eval.datasets]]\nname = "e"\npath = "p"\ncustom_generate_function_path = "multi-turn"\n'
    )
    registry, flags = Registry(), ("--environment", f"{MODULE}:Echo", "--eval-config", str(file))
    with tabular_settings(registry, *flags) as settings:
        found = [problem.where for problem in check_settings(settings, registry)]
    assert "environment.environment" not in found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "environment: found None; wanted the name of an environment, or module:factory; give --environ"),
        (("--custom-generate-function-args", '{"max_turns": 0}'), "max_turns: found 0; wanted greater than"),
        (("--custom-generate-function-args", '{"max_turn": 3}'), "did you mean 'max_turns'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_engine_starts(flags, words):
    registry = Registry()
    chosen = ("--custom-generate-function-path", "multi-turn")
    with (
        tabular_settings(registry, *chosen, *flags) as settings,
        pytest.raises((ConfigError, PluginError), match=words),
    ):
        asyncio.run(assemble(settings, registry))


def test_the_generator_keeps_its_promises():
    registry = Registry()
    with tabular_settings(registry) as settings:
        explicit = {"environment": f"{MODULE}:Letters", "environment_args": {"ends": 3}}
        function = resolve_function(
            settings, registry, "slime.generators", "multi-turn", where="args", explicit=explicit
        )
        check_generator(function)
