"""Stages of a recipe: whose value holds where, and what is refused."""

from __future__ import annotations

import pytest
from slime_core.checks.settings import check_stages
from slime_core.config.load import load_settings, load_stages
from slime_core.config.sections import CheckpointSection, ModelSection, RunSection, TrainSection
from slime_core.errors import ConfigError

RECIPE = """
[run]
run_name = "x"
num_rollout = 9
[model]
hf_checkpoint = "m"
[data]
prompt_data = "p"
[rollout]
rollout_batch_size = 4
rollout_max_response_len = 8
[reward]
rm_type = "r:r"
[train]
lr = 1e-6
min_lr = 1e-7
[stage.a]
train.lr = 1e-5
[stage.b.run]
num_rollout = 3
"""


@pytest.fixture
def load(registry_of, tmp_path):
    """Load the recipe, then another of the text `more`, then flags."""

    def stages(*flags: str, more: str = "", read=load_stages):
        (tmp_path / "r.toml").write_text(RECIPE)
        (tmp_path / "more.toml").write_text(more)
        recipes = [str(tmp_path / "r.toml"), str(tmp_path / "more.toml")]
        return read(recipes, list(flags), registry=registry_of())

    return stages


def values(stages, section, key):
    return [getattr(stage.settings.section(section), key) for stage in stages]


def refused(function, *args, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    return [str(problem) for problem in caught.value.problems]


def test_a_stage_has_its_own_values_before_the_shared_ones_and_flags_before_both(load, tmp_path):
    stages = load("--min-lr", "0", "--set", "stage.b.train.lr=7e-6", more="[stage.b.train]\nlr = 9e-6")
    assert [stage.name for stage in stages] == ["a", "b"]
    assert values(stages, TrainSection, "lr") == [1e-5, 7e-6]
    assert values(stages, TrainSection, "min_lr") == [0.0, 0.0]
    assert values(stages, RunSection, "num_rollout") == [9, 3]
    origins = [stage.settings.origin("train", "lr") for stage in stages]
    assert origins == [f"{tmp_path}/r.toml [stage.a]", "--set stage.b.train.lr"]
    assert values(load("--lr", "2e-6"), TrainSection, "lr") == [2e-6, 2e-6]


def test_each_stage_has_a_folder_below_the_runs_and_the_model_that_the_one_before_leaves(load):
    stages = load("--output-dir", "out", more="[stage.c]\n")
    assert [str(stage.folder) for stage in stages] == ["out/x/a", "out/x/b", "out/x/c"]
    assert values(stages, ModelSection, "hf_checkpoint") == ["m", "out/x/a/hf", "out/x/b/hf"]
    assert [stage.leaves and str(stage.leaves) for stage in stages] == ["out/x/a/hf", "out/x/b/hf", None]
    assert {stage.beforehand.model.hf_checkpoint for stage in stages} == {"m"}


def test_a_recipe_without_stages_is_one_run_without_a_name(load, registry_of, tmp_path):
    (tmp_path / "one.toml").write_text(RECIPE.partition("[stage")[0])
    (stage,) = load_stages([str(tmp_path / "one.toml")], [], registry=registry_of())
    assert (stage.name, str(stage.folder), stage.leaves) == ("", "runs/x", None)
    assert "the stages a, b; wanted a recipe of one run" in refused(load, read=load_settings)[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[stage.b]\ntrian.lr = 1", "more.toml [stage.b]: [trian]: found an unknown section; wanted 'train'"),
        ("[stage.b]\ntrain.lrr = 1", "more.toml [stage.b]: train.lrr: found an unknown key; wanted 'lr'"),
        ("[stage.b]\ntrain.lr = 'x'", "more.toml [stage.b]: train.lr: found 'x'"),
        ("[stage.b]\nlr = 1", "more.toml [stage.b]: lr: found a setting outside of a section; wanted it in [train]"),
        ("[stage]\nb = 1", "more.toml: stage.b: found 1; wanted tables [stage.NAME] with keys section.key"),
        ("[[stage]]\nname = 'b'", "more.toml: stage: found list; wanted tables [stage.NAME]"),
        ("[stage.'../b']", "wanted a name of letters, digits, - and _"),
        ("[stage.b.run]\nrun_name = 'y'", "[stage.b]: run.run_name: found 'y'; wanted that of the first stage"),
        ("[stage.b.run]\noutput_dir = 'y'", "[stage.b]: run.output_dir: found 'y'"),
        ("[stage.b.model]\nhf_checkpoint = 'y'", "[stage.b]: model.hf_checkpoint: found 'y'; wanted that of the"),
        ("[train]\nlr = 'x'\nbf17 = 1", "more.toml: train.bf17: found an unknown key"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_stage_is_refused_once_by_file_and_key(load, more, message):
    found = refused(load, more=more)
    assert sum(message in problem for problem in found) == 1
    assert len(found) == len(set(found))


def test_an_assignment_to_a_stage_that_there_is_not_names_those_that_there_are(load):
    found = refused(load, "--set", "stage.bb.train.lr=1")
    assert "NAME is one of a, b" in found[0]


def test_checks_say_which_stage_they_mean_unless_it_is_all(load, registry_of):
    settings = [
        "--set",
        "stage.b.train.global_batch_size=3",
        "reward.rm_weights={a = 1.0}",
        "reward.rm_type=b",
    ]
    found = [str(problem) for problem in check_stages(load(*settings), registry_of())]
    assert sum(problem.startswith("reward.rm_type, reward.custom_rm_path") for problem in found) == 1
    assert sum(problem.startswith("stage b: rollout.rollout_batch_size x") for problem in found) == 1


def test_only_the_first_stage_may_load_and_no_two_may_write_one_folder(load, registry_of):
    flags = ["--load", "runs/y", "--save-hf", "hf/{step}", "--save-interval", "2"]
    stages = load(*flags)
    assert values(stages, CheckpointSection, "load") == ["runs/y", "runs/y"]
    found = [str(problem) for problem in check_stages(stages, registry_of())]
    assert any("stage b: checkpoint.load: found 'runs/y'; wanted nothing" in problem for problem in found)
    assert any("stage b: checkpoint.save_hf: found 'hf/{step}', which stage a writes too" in problem for problem in found)  # fmt: skip
    assert not any(problem.startswith("stage a") for problem in found)
