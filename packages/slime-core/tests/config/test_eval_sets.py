"""`--eval-config`: what is wrong with the file is told before a run, in our words, by where it stands."""

from __future__ import annotations

import os

import pytest
from slime_core.checks.settings import check_settings
from slime_core.config.eval_sets import eval_sets
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_build
from slime_core.testing.contracts.runs import tabular_settings

REGISTRY = Registry()
#: A set in which nothing is wrong, but for its file.
SET = '[[eval.datasets]]\nname = "a"\npath = "a.jsonl"\n'


@pytest.fixture
def told(tmp_path):
    """Return what is said about a file of evaluation sets."""

    def of(text: str, suffix: str = ".toml") -> str:
        file = tmp_path / f"sets{suffix}"
        file.write_bytes(text.encode())
        words = ("--eval-interval", "1", "--eval-config", str(file))
        with tabular_settings(REGISTRY, *words) as settings, pytest.raises(ConfigError) as caught:
            eval_sets(settings, REGISTRY)
        return str(caught.value).replace(str(file), "FILE")

    return of


@pytest.mark.parametrize("value", ['"a.jsonl"', "3", '["x"]', "true"])
def test_sets_that_are_no_tables_are_named(told, value):
    found = value.replace('"', "'").replace("true", "True")
    assert told(f"[eval.datasets]\na = {value}\n") == (
        f'eval.eval_config (FILE): datasets.a: found {found}; wanted a table of its settings: a = {{ path = "a.jsonl" }}'
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[eval.datasets]]\nname = ""\npath = "x"\n', "found the name ''; wanted one that can be read: gsm8k"),
        ('[[eval.datasets]]\nname = "a\\nb"\npath = "x"\n', r"found the name 'a\nb'; wanted one that can be read"),
        ('[[eval.datasets]]\nname = "a"\n', "a.path: found nothing; wanted text that is not empty"),
        ('[[eval.datasets]]\nname = "a"\npath = ""\n', "a.path: found ''; wanted text that is not empty"),
        (SET + 'temperature = "1"\n', "a.temperature: found '1'; wanted a number of at least 0, or none"),
        (SET + "top_k = 0\n", "a.top_k: found 0; wanted -1 for all, or how many of the most likely: 1 or more"),
        (SET + "n_samples_per_eval_prompt = 0\n", "found 0; wanted a whole number of at least 1, or none"),
        (SET + "repetition_penalty = 0.5\n", "found 0.5; wanted a number of at least 1 and at most 1"),
        (SET + "no_stop_trim = false\n", "a.no_stop_trim: found False; wanted True"),
        (SET + "metadata_overrides = {a = 2020-01-01}\n", "wanted what JSON has, not datetime.date(2020, 1, 1) of the type date"),
        (SET + "metadata_overrides = {a = [nan]}\n", "wanted what JSON has, not the number nan"),
        (SET + "[train]\nlr = 1\n", "found 'train' at its top, which nothing reads; wanted a table `eval`"),
        ("[eval]\ndefaults = false\n" + SET, "wanted a table `eval` with `datasets`"),
        ("", "found nothing in it; wanted a table `eval`"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_set_is_told_in_our_words(told, text, said):
    assert said in told(text)


def test_json_with_a_key_twice_is_refused(told):
    text = '{"eval": {"eval": 1,\n "eval": 2}}'
    assert "the key 'eval' twice in one object" in told(text, ".json")


@pytest.mark.timeout(20)
def test_a_pipe_and_a_missing_file_are_refused_also_where_nothing_is_evaluated(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    for name, said in (("pipe.toml", "found no file"), ("none.toml", "No such file or directory")):
        words = ("--eval-interval", "none", "--eval-config", str(tmp_path / name))
        with tabular_settings(REGISTRY, *words) as settings:
            assert any(said in str(problem) for problem in check_settings(settings, REGISTRY))


@pytest.mark.parametrize(
    ("more", "flags", "said"),
    [
        ("min_new_tokens = 5\nmax_response_len = 1\n", (), "a.min_new_tokens: found 5, where a response has at most 1 tokens"),
        ("max_context_len = 4\n", ("--eval-min-new-tokens", "9"), "eval.eval_min_new_tokens: found 9, where a response"),
    ],
)  # fmt: skip
def test_more_tokens_at_least_than_at_most_are_refused_of_sets(tmp_path, more, flags, said):
    file = tmp_path / "sets.toml"
    file.write_text(SET + more)
    words = ("--eval-interval", "1", "--eval-config", str(file), *flags)
    with tabular_settings(REGISTRY, *words) as settings:
        assert any(said in str(problem) for problem in check_settings(settings, REGISTRY))


def test_stop_ids_of_a_set_are_ids_of_the_vocabulary(tmp_path):
    file = tmp_path / "sets.toml"
    file.write_text(SET + "stop_token_ids = [3, 999999]\n")
    words = ("--eval-interval", "1", "--eval-config", str(file))
    with tabular_settings(REGISTRY, *words) as settings, pytest.raises(ConfigError) as caught:
        make_build(settings, REGISTRY)
    (problem,) = caught.value.problems
    assert problem.where.endswith("a.stop_token_ids") and problem.found == "999999"
