"""`--eval-config`: each set by its own reward, generator, sampling and columns; what is wrong with it is said before a run."""

from __future__ import annotations

import json

import pytest
from slime_core.config.eval_sets import eval_sets
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.testing.contracts.runs import tabular_settings

CONFIG = """
eval:
  defaults:
    n_samples_per_eval_prompt: 2
    temperature: 1.0
  datasets:
    - name: plain
      path: {folder}/letters.jsonl
      max_response_len: 1
      weight: 3.0
    - name: tools
      path: {folder}/others.jsonl
      input_key: question
      label_key: answer
      custom_rm_path: tool_generate.reward_func
      custom_generate_function_path: tool_generate.generate_appending
      n_samples_per_eval_prompt: 4
      min_new_tokens: 2
      metadata_overrides:
        origin: here
"""


@pytest.fixture
def config(letters):
    """Two sets, one with everything of its own."""
    folder = letters.parent
    rows = [{"question": letter, "answer": "b"} for letter in "ab"]
    (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "eval.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


def test_sets_have_rewards_generators_and_sampling_of_their_own(train, config):
    flags = ["--eval-config", str(config), "--eval-interval", "1", "--num-rollout", "1"]
    run = train(*flags, "--eval-reward-key", "none", "--eval-pass-threshold", "1")
    found = {"plain": [], "tools": []}
    for sample in run.samples("eval_step_000001"):
        found[sample["metadata"]["source_name"]].append(sample)
    assert len(found["plain"]) == 10 * 2 and len(found["tools"]) == 2 * 4
    assert all(sample["response_length"] == 1 for sample in found["plain"])
    for sample in found["tools"]:
        assert sample["metadata"]["origin"] == "here"
        assert sample["metadata"]["evaluation"] is True
        assert sample["metadata"]["scored_by"] == "reward_func"
        assert sample["reward"]["score"] == sample["response"].count("b")
        assert len(sample["environment_spans"]) == 1
    row = run.rows[-1]
    assert {"eval/plain-pass@2", "eval/tools-pass@4"} <= set(row) and "eval/plain-pass@4" not in row
    rates = {name: row[f"eval/{name}-pass@1"] for name in found}
    assert run.summary["eval_after"] == pytest.approx((3 * rates["plain"] + rates["tools"]) / 4)


def test_the_context_limit_of_evaluations_cuts_responses(train, letters):
    held = ["--eval-interval", "1", "--eval-prompt-data", "held", str(letters.parent / "letters.jsonl")]
    run = train(*held, "--eval-max-context-len", "3", "--eval-min-new-tokens", "2", "--num-rollout", "1")
    assert {sample["response_length"] for sample in run.samples("eval_")} == {2}


@pytest.mark.parametrize(
    "change, wanted",
    [
        (
            ("max_response_len: 1", "max_len: 1"),
            r"plain.max_len: found 1; wanted one of path, weight, rm_type",
        ),
        (("- name: tools", "- name: plain"), "found the set 'plain' twice; wanted each name once"),
        (("tool_generate.reward_func", "tool_generate.nothing"), "'tool_generate.nothing'.* does not import"),
        (("/others.jsonl", "/nowhere.jsonl"), r"tools.path: .*nowhere.jsonl"),
        (("temperature: 1.0", "temperature: hot"), r"plain.temperature: found 'hot'"),
        (("  datasets:", "  data:"), "wanted a table `eval` with `datasets`"),
    ],
)
def test_what_is_wrong_with_the_file_is_named_before_anything_starts(train, config, change, wanted):
    config.write_text(config.read_text().replace(*change))
    with pytest.raises(ConfigError, match=wanted):
        train("--eval-config", str(config), "--eval-interval", "1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {name: a, path: b, path: c}", "the key 'path' twice in one table, which begins in line 3"),
        ("- {name: a, path: b, 1: c}", "a.1: found 1; wanted one of path, weight"),
        ("  a: letters.jsonl", "datasets.a: found 'letters.jsonl'; wanted a table of its settings"),
        (None, "found nothing in it; wanted a table `eval`"),
    ],
)
def test_yaml_of_keys_twice_or_of_no_tables_is_refused(tmp_path, text, said):
    file, registry = tmp_path / "sets.yaml", Registry()
    file.write_text("" if text is None else f"eval:\n  datasets:\n  {text}\n")
    with (
        tabular_settings(registry, "--eval-config", str(file)) as settings,
        pytest.raises(ConfigError) as caught,
    ):
        eval_sets(settings, registry)
    assert said in str(caught.value)


def test_keys_that_yaml_merges_do_not_stand_twice(tmp_path):
    file, registry = tmp_path / "sets.yaml", Registry()
    file.write_text("eval:\n  datasets:\n  - &a {name: a, path: b, top_p: 0.5}\n  - {<<: *a, name: c}\n")
    with tabular_settings(registry, "--eval-config", str(file)) as settings:
        assert [one.top_p for one in eval_sets(settings, registry).values()] == [0.5, 0.5]
