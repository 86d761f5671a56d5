"""Settings that do not go together, refused before anything starts."""

from __future__ import annotations

import pytest
from slime_core.checks.settings import check_settings, check_stages
from slime_core.config.build import BuildContext
from slime_core.config.derive import choices
from slime_core.config.load import load_settings
from slime_core.config.stages import Stage
from slime_core.data.make_source import make_eval_source, make_source
from slime_core.data.promptless_source import PromptlessSource
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import resolve_eval_function
from slime_core.testing.contracts.runs import tabular_settings
from slime_core.testing.tabular import load_tokenizer

REGISTRY = Registry()
OWN = """
from slime_core.data.promptless_source import PromptlessSource

class Mine(PromptlessSource): pass

def source(build): return Mine(4)

async def rollout(run, step): return await run.next_groups(step)

async def evaluating(run, step): return await run.next_groups(step)

evaluating.evaluates = rollout
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Make functions of somebody's own importable."""
    (tmp_path / "own_cross.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def told(*flags: str) -> list[str]:
    """Return what is said of a run that nothing else is wrong with."""
    with tabular_settings(REGISTRY, *flags) as settings:
        return [str(problem) for problem in check_settings(settings, REGISTRY)]


@pytest.mark.parametrize("loop", ["one-step-off", "slime-core/one-step-off", "fully-async"])
def test_a_loop_that_generates_while_it_trains_wants_devices_of_its_own(loop):
    assert told("--loop", loop) == []
    wanted = f"wanted devices of their own: the loop {loop} generates while it trains"
    found = f"cluster.colocate: found trainer and engine that share devices; {wanted}"
    assert told("--loop", loop, "--colocate") == [found]
    assert told("--loop", "sync", "--colocate") == []


def test_a_loop_that_is_a_step_ahead_wants_samples_to_be_so_old():
    (found,) = told("--loop", "slime-core/one-step-off", "--max-staleness", "0")
    assert found.startswith("rollout.max_staleness: found 0; wanted at least 1: groups are generated a step")
    assert told("--loop", "one-step-off", "--max-staleness", "1") == []
    assert told("--loop", "sync", "--partial-rollout", "--max-staleness", "0") == []


@pytest.mark.usefixtures("own")
def test_only_the_dispatcher_generates_through_weight_updates():
    mine = ("--rollout-function-path", "own_cross:rollout")
    (found,) = told("--loop", "fully-async", *mine)
    assert found.startswith(
        "rollout.rollout_function_path: found own_cross:rollout; wanted default: only the"
    )
    assert told("--loop", "one-step-off", *mine) == []
    assert told("--loop", "fully-async", "--rollout-function-path", "slime-core/default") == []


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (("--save-interval", "2"), ["checkpoint.save_interval"]),
        (
            ("--save-interval", "2", "--save-hf", "out/step_{step}"),
            ["checkpoint.save_interval", "checkpoint.save_hf"],
        ),
        ((), []),
    ],
)
def test_nothing_is_saved_where_nothing_is_trained(flags, where):
    flags = ("--train-backend", "none", "--loop", "rollout-only", "--no-save-last", *flags)
    with tabular_settings(REGISTRY, *flags) as settings:
        problems = check_stages([Stage("", settings, settings)], REGISTRY, to_train=True)
    assert [problem.where for problem in problems] == where
    assert all(problem.found.endswith("where nothing is trained") for problem in problems)


@pytest.mark.parametrize("reducer", ["sample-mean", "constant"])
def test_a_reducer_beside_the_flag_for_another_is_refused(load, reducer):
    per_token = "--calculate-per-token-loss"
    with pytest.raises(ConfigError, match=f"it beside the reducer '{reducer}'; wanted one of them"):
        choices(load(per_token, "--loss-reducer", reducer))
    assert choices(load(per_token)).reducer == "token-mean"
    assert choices(load(per_token, "--loss-reducer", "token-mean")).reducer == "token-mean"


def test_a_recorded_recipe_may_hold_the_reducer_that_nobody_chose(load, registry_of, tmp_path):
    path = tmp_path / "recorded.toml"
    path.write_text(load("--calculate-per-token-loss").to_toml())
    assert choices(load_settings([str(path)], [], registry=registry_of())).reducer == "token-mean"


WITHOUT = ("--disable-rollout-global-dataset", "--prompt-data", "none", "--num-rollout", "1")


def source_of(*flags: str, make=make_source):
    with tabular_settings(REGISTRY, *flags) as settings:
        return make(
            BuildContext(
                settings=settings,
                registry=REGISTRY,
                load_tokenizer=lambda: load_tokenizer(None),
                model_path=None,
                run_dir=None,
            )
        )


@pytest.mark.usefixtures("own")
def test_a_source_of_ones_own_is_asked_also_where_no_prompts_are_read():
    flags = (*WITHOUT, "--data-source-path", "own_cross:source")
    assert told(*flags) == []
    assert type(source_of(*flags)).__name__ == "Mine"
    files = (*WITHOUT, "--data-source-path", "slime-core/file")
    assert type(source_of(*files)) is PromptlessSource


def test_no_prompts_and_a_source_that_has_some_are_refused():
    (found,) = told(*WITHOUT, "--data-source-path", "gym")
    wanted = (
        "data.disable_rollout_global_dataset: found it beside data.data_source_path 'gym', which has prompts"
    )
    assert found.startswith(wanted)


@pytest.mark.usefixtures("own")
def test_options_of_an_evaluation_that_the_rollout_brings_are_refused():
    flags = ("--rollout-function-path", "own_cross:evaluating")
    with tabular_settings(REGISTRY, *flags) as settings:
        assert resolve_eval_function(settings, REGISTRY).__name__ == "rollout"
    told = (
        "eval.eval_function_args: found {'a': 1}; wanted none: own_cross:evaluating brings its own evaluation"
    )
    given = ("--eval-function-args", '{"a": 1}')
    with tabular_settings(REGISTRY, *flags, *given) as settings, pytest.raises(ConfigError, match=told):
        resolve_eval_function(settings, REGISTRY)


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [((), True), (("--eval-temperature", "1"), False), (("--n-samples-per-eval-prompt", "1"), False)],
)
def test_several_greedy_samples_of_a_prompt_are_told_to_be_one(tmp_path, caplog, flags, is_told):
    (tmp_path / "held.jsonl").write_text('{"input": "a", "label": "b"}\n')
    held_out = ("--eval-interval", "1", "--eval-prompt-data", "held", str(tmp_path / "held.jsonl"))
    source_of(*held_out, "--n-samples-per-eval-prompt", "4", *flags, make=make_eval_source)
    assert ("evaluation held: n_samples_per_eval_prompt 4 with temperature 0" in caplog.text) == is_told
