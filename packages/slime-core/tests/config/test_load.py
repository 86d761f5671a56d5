"""Settings: order, origins, and every problem at once."""

from __future__ import annotations

import json

import pytest
from slime_core.checks.settings import check_settings
from slime_core.cli.arguments import split
from slime_core.config.derive import batch_sizes, choices
from slime_core.config.load import load_settings
from slime_core.config.sections import RewardSection, TrainSection
from slime_core.errors import ConfigError

from .recipes import RECIPE, problems


def test_flags_override_recipes_override_defaults(load, recipe, tmp_path, registry_of):
    second = tmp_path / "second.toml"
    second.write_text("[train]\nlr = 3e-5\nbf16 = false\n[rollout]\nn_samples_per_prompt = 3\n")
    settings = load_settings([recipe, str(second)], ["--lr", "1e-4"], registry=registry_of())
    train, rollout = settings.train, settings.rollout
    assert (train.lr, train.bf16, train.clip_grad) == (1e-4, False, 1.0)
    assert (rollout.n_samples_per_prompt, rollout.rollout_batch_size) == (3, 4)
    assert settings.origin("train", "lr") == "--lr"
    assert settings.origin("rollout", "n_samples_per_prompt") == str(second)
    assert settings.origin("train", "clip_grad") == "default"


def test_flag_forms(load):
    settings = load(
        "--no-bf16", "--rollout-top-k=-1", "--rollout-stop", "a", "b", "--rm-args", '{"x": 1}', "--num-epoch", "none",
        "--set", "train.lr=2e-5", "run.run_name=x", "--prompt-key", "question",
    )  # fmt: skip
    assert settings.train.lr == 2e-5
    assert settings.train.bf16 is False
    assert settings.rollout.rollout_stop == ["a", "b"]
    assert settings.run.run_name == "x"
    assert settings.data.input_key == "question"  # the reference system's older spelling


def test_every_problem_is_reported_at_once_with_the_nearest_name(load):
    found = problems(load, "--rollout-batch-sise", "3", "--lr", "fast", "--set", "train.lrr=1", "--no-lr")
    assert found[0].startswith("--rollout-batch-sise: found an unknown flag; wanted '--rollout-batch-size'")
    assert any(p.startswith("--lr: found 'fast'") for p in found)
    assert any("'train.lr' (the nearest name)" in p for p in found)
    assert any(p.startswith("--no-lr: found an unknown flag") for p in found)


FOREIGN = """
from slime_core.config.base import SectionModel
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl
class Acme(SectionModel):
    words: dict[str, str] = {}
@hookimpl
def slime_config_sections():
    return [Section("acme", Acme, prefix="", foreign=ForeignFlags("words", ["lr_warmup_iter", "te_rng_tracker"]))]
"""


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("--learning-rate", "'--lr'"),
        ("--gpus", "'--actor-num-gpus-per-node'"),
        ("--dataset", "'--prompt-data'"),
        ("--lr-warmup-iterss", "'--lr-warmup-iters' (the nearest name)"),  # own before foreign
        ("--te-rng-traker", "'--te-rng-tracker' (the nearest name)"),
        ("--kl", "a known flag"),  # the flag that is meant is not installed
        ("--zzz", "a known flag"),
    ],
)
def test_unknown_flag_gets_the_flag_that_is_meant_or_none(install, registry_of, recipe, word, wanted):
    install("acme", "[slime]\nacme = acme_foreign\n", acme_foreign=FOREIGN)
    found = problems(lambda: load_settings([recipe], [word, "1"], registry=registry_of()))
    assert found == [f"{word}: found an unknown flag; wanted {wanted}; see `slime config flags`"]


@pytest.mark.parametrize(
    ("words", "late"),
    [
        (["--num-rollout", "2", "r.toml"], "r.toml: found it behind a flag; wanted recipes before all flags"),
        (["--overwrite", "r.toml"], "r.toml"),
        (["r.toml", "--tracker", "jsonl", "s.toml"], "s.toml"),
        (["r.toml", "--load", "s.toml", "--set", "run.run_name=s.toml", "--save-hf=s.toml"], None),
    ],
)
def test_recipe_behind_a_flag_is_told_from_the_value_of_one(words, late):
    if late is None:
        assert split(words) == (words[:1], words[1:])
    else:
        (found,) = problems(split, words)
        assert found.startswith(late)


@pytest.mark.parametrize(
    ("flag", "value", "found", "wanted"),
    [
        ("--rollout-seed", "-1", "-1", "a whole number of at least 0"),
        ("--rollout-seed", str(2**32), str(2**32), "a whole number of at least 0 and at most 4294967295"),
        ("--rollout-temperature", "inf", "inf", "a number of more than 0 and at most 1e+09"),
        ("--rollout-temperature", "0", "0.0", "a number of more than 0"),
        ("--lr", "nan", "nan", "a number of at least 0"),
        ("--lr", "fast", "'fast'", "a number of at least 0"),
        ("--adam-beta1", "1.0", "1.0", "a number of at least 0 and less than 1"),
        ("--rollout-batch-size", "1e30", "'1e30'", "a whole number of at least 1"),
        ("--rollout-batch-size", "2.0", "'2.0'", "a whole number of at least 1"),
        ("--reward-memory-gb", "1e-7", "1e-07", "a number of at least 0.1 and at most 1e+06, or none"),
        ("--reward-memory-gb", "inf", "inf", "a number of at least 0.1 and at most 1e+06, or none"),
        ("--reward-timeout-s", "inf", "inf", "a number of at least 0.001 and at most 3e+08"),
        ("--rollout-top-k", "0", "0", "-1 for all, or how many of the most likely: 1 or more"),
        ("--rollout-stop", "", "''", "a list, each of it text that is not empty"),
        ("--rollout-stop-token-ids", "-1", "-1", "a list, each of it a whole number of at least 0"),
        ("--lr-decay-style", "fast", "'fast'", "'constant' or 'linear' or 'cosine'"),
        ("--bf16", "perhaps", "'perhaps'", "true or false"),
        ("--std-ddof", "2", "'2'", "0 or 1"),
        ("--rm-weights", '{"a": "b"}', "'b'", "a table, each value of it a number"),
        ("--rm-args", "[1]", "[1]", "a table of keys and values"),
        ("--rm-args", '{"a": 1, "a": 2}', "'{\"a\": 1, \"a\": 2}'", "a JSON object (the key 'a' twice in one object)"),
        ("--rm-args", '{"a": NaN}', "'{\"a\": NaN}'", "a JSON object (NaN, which is no number of JSON)"),
        ("--rollout-batch-size", "9" * 5000, f"'{'9' * 59}...", "a whole number of at least 1"),
    ],
)  # fmt: skip
def test_values_that_a_flag_does_not_take_are_refused_in_our_words(load, flag, value, found, wanted):
    (said,) = problems(load, flag, value)
    assert said == f"{flag}: found {found}; wanted {wanted}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.lr = true", "train.lr: found true; wanted a number of at least 0"),
        ("train.lr = '1e-5'", "train.lr: found '1e-5'; wanted a number of at least 0"),
        ("train.max_tokens_per_gpu = 1.0", "train.max_tokens_per_gpu: found 1.0; wanted a whole number of at least 1"),
        ("algorithm.std_ddof = true", "algorithm.std_ddof: found true; wanted 0 or 1"),
        ("train.bf16 = 1", "train.bf16: found 1; wanted true or false"),
        ("run.run_name = 3", "run.run_name: found 3; wanted text"),
        ("run.run_name = 'a\\u0000b'", None),
        ('run.run_name = "a\\u0000b"', "run.run_name: found 'a\\x00b', with a zero byte; wanted text without it"),
        ("rollout.rollout_stop = 'x'", "rollout.rollout_stop: found 'x'; wanted a list, each of it text that is not empty"),
        ("rollout.rollout_stop_token_ids = [1, true]", "rollout.rollout_stop_token_ids.1: found True; wanted a list, each "
         "of it a whole number of at least 0"),
        ("train.lr = 1979-05-27", "train.lr: found datetime.date(1979, 5, 27); wanted a number of at least 0"),
        ("data = 3", "data: found 3; wanted a table: [data]"),
    ],
)  # fmt: skip
def test_values_of_a_recipe_have_the_type_of_their_setting(registry_of, tmp_path, line, said):
    path = tmp_path / "r.toml"
    base = tmp_path / "base.toml"
    base.write_text(RECIPE)
    path.write_text(line + "\n")
    if said is None:
        load_settings([str(base), str(path)], [], registry=registry_of())
    else:
        (found,) = problems(lambda: load_settings([str(base), str(path)], [], registry=registry_of()))
        assert found == f"{path}: {said}"


def test_unknown_key_of_a_recipe_names_file_and_section(registry_of, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(RECIPE + "[train]\nlearning_rate = 1\nrm_type = 'x'\n[trian]\nlr = 1\n")
    found = problems(lambda: load_settings([str(path)], [], registry=registry_of()))
    assert f"{path}: train.learning_rate: found an unknown key" in found[0]
    assert f"{path}: train.rm_type: found an unknown key; wanted it in [reward]" in found[1]
    assert found[2] == f"{path}: [trian]: found an unknown section; wanted 'train' (the nearest name)"


def test_what_is_not_installed_is_named_by_its_distribution(load, registry_of, tmp_path):
    path = tmp_path / "gym.toml"
    path.write_text(RECIPE + "[gym]\ngym_tasks = []\n")
    found = problems(lambda: load_settings([str(path)], [], registry=registry_of()))
    assert found == [
        f"{path}: [gym]: found an unknown section; wanted slime-gym, which brings it; install it"
    ]
    flags = ("--num-rollout", "1", "--prompt-data", "p", "--rm-type", "exact")
    found = [str(problem) for problem in check_settings(load(*flags), registry_of())]
    for setting, distribution in {
        "model.tokenizer": "slime-models",
        "train.train_backend": "slime-megatron",
    }.items():
        (said,) = [problem for problem in found if problem.startswith(setting)]
        assert f"install {distribution}, which brings it" in said


def test_missing_values_say_which_flag_gives_them(registry_of):
    found = problems(lambda: load_settings([], [], registry=registry_of()))
    assert any("give --rollout-batch-size or set it in [rollout]" in p for p in found)


def test_unreadable_recipe_is_the_only_complaint(registry_of, tmp_path):
    assert len(problems(lambda: load_settings([str(tmp_path / "no.toml")], [], registry=registry_of()))) == 1


def test_plugin_section_gets_prefixed_flags(install, registry_of, recipe):
    source = (
        "from slime_core.config.base import SectionModel\n"
        "from slime_core.plugins.hooks import Section, hookimpl\n"
        "class Acme(SectionModel):\n    size: int = 3\n    '''How many.'''\n"
        "@hookimpl\ndef slime_config_sections():\n    return [Section('acme', Acme)]\n"
    )
    install("acme", "[slime]\nacme = acme_section\n", acme_section=source)
    settings = load_settings([recipe], ["--acme-size", "5"], registry=registry_of())
    assert settings.section_of("acme") == {"size": 5}


def test_two_owners_of_one_flag_are_refused(install, registry_of, recipe):
    source = (
        "from slime_core.config.base import SectionModel\n"
        "from slime_core.plugins.hooks import Section, hookimpl\n"
        "class Acme(SectionModel):\n    lr: float = 3.0\n"
        "@hookimpl\ndef slime_config_sections():\n    return [Section('acme', Acme, prefix='')]\n"
    )
    install("acme", "[slime]\nacme = acme_clash\n", acme_clash=source)
    found = problems(lambda: load_settings([recipe], [], registry=registry_of()))
    assert found == ["--lr: found it in slime-core and in acme; wanted one owner; uninstall one"]


def test_batch_sizes_that_do_not_multiply_out_show_the_equation(load):
    found = problems(batch_sizes, load("--global-batch-size", "3"))
    assert "4 x 2 = 8, and 3 x 2 = 6" in found[0]


def test_batch_sizes_follow_from_steps(load):
    sizes = batch_sizes(load("--num-steps-per-rollout", "2"))
    assert (sizes.global_batch_size, sizes.num_steps_per_rollout, sizes.over_sampling_batch_size) == (4, 2, 4)


def test_cross_checks_name_what_is_missing(load, registry_of):
    found = [str(p) for p in check_settings(load("--eval-interval", "2"), registry_of())]
    for wanted in ("run.num_rollout", "data.prompt_data", "eval.eval_interval", "reward.rm_type"):
        assert any(p.startswith(wanted) for p in found), wanted


def test_two_rewards_are_refused(load, registry_of):
    found = [str(p) for p in check_settings(load("--rm-type", "a", "--custom-rm-path", "b:c"), registry_of())]
    assert any("found 'a', 'b:c' and {}; wanted one of them" in p for p in found)


@pytest.mark.parametrize(
    ("table", "flags", "chosen"),
    [
        ("rm_type = 'a'", ["--custom-rm-path", "b:c"], {"b:c": 1.0}),
        ("custom_rm_path = 'b:c'", ["--rm-type", "a"], {"a": 1.0}),
        ("rm_type = 'a'", ["--rm-weights", '{"d": 2.0}'], {"d": 2.0}),
        ("rm_weights = {d = 2.0}", ["--set", "reward.custom_rm_path=b:c"], {"b:c": 1.0}),
        ("rm_type = 'a'", ["--custom-rm-path", "none"], {"a": 1.0}),
    ],
)
def test_a_flag_that_chooses_the_reward_takes_the_place_of_what_a_recipe_chose(
    registry_of, recipe, tmp_path, table, flags, chosen
):
    path = tmp_path / "reward.toml"
    path.write_text(f"[reward]\n{table}\n")
    settings = load_settings([recipe, str(path)], flags, registry=registry_of())
    assert choices(settings).rewards == chosen
    path.write_text(settings.to_toml())  # as it is recorded in the run's folder
    assert choices(load_settings([str(path)], [], registry=registry_of())).rewards == chosen


@pytest.mark.parametrize(
    ("table", "flags", "chosen"),
    [
        ("num_rollout = 45", ["--num-epoch", "3"], (None, 3)),
        ("num_epoch = 3", ["--num-rollout", "45"], (45, None)),
        ("num_rollout = 45\nnum_epoch = 3", [], (45, 3)),
    ],
)
def test_a_flag_for_the_length_of_a_run_takes_the_place_of_what_a_recipe_chose(
    registry_of, recipe, tmp_path, table, flags, chosen
):
    path = tmp_path / "length.toml"
    path.write_text(f"[run]\n{table}\n")
    run = load_settings([recipe, str(path)], flags, registry=registry_of()).run
    assert (run.num_rollout, run.num_epoch) == chosen


def test_weights_beside_a_reward_or_its_options_are_refused(load, registry_of):
    weights = ["--rm-weights", '{"a": 1.0}']
    found = [str(p) for p in check_settings(load("--rm-type", "b", *weights), registry_of())]
    assert any("found 'b', None and {'a': 1.0}; wanted one of them" in p for p in found)
    found = [str(p) for p in check_settings(load("--rm-args", '{"x": 1}', *weights), registry_of())]
    assert any(p.startswith("reward.rm_args: found options beside reward.rm_weights") for p in found)


def test_settings_cannot_be_changed(load):
    with pytest.raises(ValueError, match="frozen"):
        load().section(TrainSection).lr = 1.0


def test_toml_of_settings_loads_to_the_same_settings(load, registry_of, tmp_path):
    settings = load("--lr", "1e-5", "--rollout-stop", "\n", '"')
    path = tmp_path / "again.toml"
    path.write_text(settings.to_toml())
    again = load_settings([str(path)], [], registry=registry_of())
    assert again.sections == settings.sections


def test_what_toml_lacks_survives_it(install, registry_of, recipe, tmp_path):
    source = (
        "from typing import Any\n"
        "from slime_core.config.base import SectionModel\n"
        "from slime_core.plugins.hooks import Section, hookimpl\n"
        "class Acme(SectionModel):\n    size: int | None = 3\n    sort: str | None = None\n"
        "    turns: list[dict[str, Any]] = []\n"
        "@hookimpl\ndef slime_config_sections():\n    return [Section('acme', Acme)]\n"
        "CONVENTIONS = {'acme': {'size': 4, 'sort': 'theirs'}}\n"
    )
    points = "[slime]\nacme = acme_none\n[slime.numerics]\ntheirs = acme_none:CONVENTIONS\n"
    install("acme", points, acme_none=source)
    turns = [{"role": "assistant", "content": None}, {"role": "user", "content": "5?"}]
    flags = ["--numerics", "theirs", "--acme-size", "none", "--set", "acme.sort=none"]
    flags += ["--acme-turns", *map(json.dumps, turns)]
    options = {"x": None, "y": [1, {"z": None}], "none": "none"}
    settings = load_settings([recipe], [*flags, "--rm-args", json.dumps(options)], registry=registry_of())
    assert settings.section_of("acme") == {"size": None, "sort": None, "turns": turns}
    path = tmp_path / "again.toml"
    path.write_text(settings.to_toml())
    again = load_settings([str(path)], [], registry=registry_of())
    assert again.section(RewardSection).rm_args == options
    assert again.sections == settings.sections


def test_conventions_whose_tables_are_none_are_refused(install, registry_of, recipe):
    points = "[slime.numerics]\ntheirs = acme_tables:CONVENTIONS\n"
    source = "CONVENTIONS = {'train': 3, 'rollout': None, 'eval': ['lr']}\n"
    install("acme", points, acme_tables=source)
    with pytest.raises(ConfigError) as caught:
        load_settings([recipe], ["--numerics", "theirs"], registry=registry_of())
    assert [str(problem) for problem in caught.value.problems] == [
        f"numerics theirs: {table}: found {found}; wanted a table of settings and their values"
        for table, found in (("train", "3"), ("rollout", "None"), ("eval", "['lr']"))
    ]


def test_string_in_the_place_of_a_table_is_refused(load):
    assert "--set reward.rm_args" in problems(load, "--set", "reward.rm_args=broken")[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--update-weight-host", "127.0.0.2"], "found 127.0.0.2, with nobody to meet there; wanted --update-weight-transport"),
        (
            ["--update-weight-transport", "distributed", "--update-weight-host", "192.0.2.77"],
            "found 192.0.2.77; wanted an IPv4 address of this machine",  # 192.0.2.0/24 is nobody's
        ),
        (
            [
                *("--update-weight-transport", "distributed", "--actor-num-nodes", "2"),
                *("--update-weight-host", "127.0.0.1"),
            ],
            "found 127.0.0.1, which ranks on other machines do not reach, and 2 nodes; wanted an address of this machine",
        ),
    ],
)  # fmt: skip
def test_an_address_where_the_trainer_cannot_meet_the_engine_is_refused(load, registry_of, flags, message):
    found = [str(problem) for problem in check_settings(load(*flags), registry_of())]
    assert [each for each in found if each.startswith(f"train.update_weight_host: {message}")]
    met = load("--update-weight-transport", "distributed", "--update-weight-host", "127.0.0.2")
    assert not [p for p in check_settings(met, registry_of()) if p.where == "train.update_weight_host"]
