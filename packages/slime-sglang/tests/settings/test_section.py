"""Arguments of SGLang's server as settings: which there are, and how they are given."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_sglang.server.command import server_arguments
from slime_sglang.settings.section import SglangSection, argument_problems, known_arguments, update_problems

SCRIPT = Path(__file__).parents[4] / "scripts/sglang_flags.py"
REQUIRED = ("--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--rollout-engine", "sglang")


def test_the_list_of_arguments_is_that_of_the_installed_sglang() -> None:
    spec = importlib.util.spec_from_file_location("sglang_flags", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert sorted(known_arguments()) == script.flags()


def test_an_argument_of_sglang_is_a_flag_with_its_prefix() -> None:
    settings = load_settings(
        [],
        [*REQUIRED, "--hf-checkpoint", "m", "--sglang-mem-fraction-static", "0.8", "--sglang-enable-metrics"],
        registry=Registry.from_environment(),
    )
    given = settings.section(SglangSection).server_args
    assert server_arguments(given) == ["--mem-fraction-static", "0.8", "--enable-metrics"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"ep_size": "two"}, "a whole number of at least 1"),
        ({"dp_size": 0, "enable_dp_attention": True}, "a whole number of at least 1"),
        ({"data_parallel_size": True, "enable_dp_attention": True}, "a whole number of at least 1"),
        ({"max_total_tokens": "-5"}, "a whole number of at least 1"),
        ({"base_gpu_id": 1.5}, "a whole number of at least 0"),
        ({"mem_fraction_static": "nan"}, "a number above 0, and 1 at most"),
        ({"mem_fraction_static": 8}, "a number above 0, and 1 at most"),
    ],
)
def test_a_number_that_slime_reckons_with_is_one(given, wanted) -> None:
    name = next(iter(given))
    (problem,) = argument_problems(given, where="here")
    assert (problem.where, problem.found, problem.wanted) == (f"here.{name}", str(given[name]), wanted)


def test_numbers_that_are_right_are_no_problem() -> None:
    given = {"ep_size": "4", "base_gpu_id": 0, "max_total_tokens": 4096, "mem_fraction_static": "0.8"}
    assert list(argument_problems(given, where="here")) == []


@pytest.mark.parametrize(
    "given",
    [
        {"enable_eplb": True},
        {"ep_num_redundant_experts": 4},
        {"init_expert_location": "map.json"},
        {"hicache_storage_backend": "file"},
        {"enable_lmcache": True},
    ],
)
def test_servers_that_may_answer_by_other_weights_than_the_last_are_refused(given: dict[str, object]) -> None:
    (problem,) = update_problems(given, where="here")
    (name,) = given
    assert (problem.where, problem.found) == (f"here.{name}", str(given[name]))


def test_defaults_of_such_arguments_are_no_problem() -> None:
    given = {
        "enable_eplb": False,
        "ep_num_redundant_experts": 0,
        "init_expert_location": "trivial",
        "hicache_storage_backend": None,
    }
    assert list(update_problems(given, where="here")) == []
