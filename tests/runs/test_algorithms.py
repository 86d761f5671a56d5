"""Choosing estimator, loss, transform and conventions: what settings make of names."""

import pytest
from slime_algos.numerics import OPENRLHF, SLIME, TRL, VERL
from slime_core.checks.settings import check_settings
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import algorithm


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.from_environment()


@pytest.fixture
def settings(registry, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"input": "a"}\n')
    needed = [
        "--hf-checkpoint", "m", "--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--rm-type", "math",
        "--num-rollout", "1", "--prompt-data", str(tmp_path / "data.jsonl"),
    ]  # fmt: skip
    return lambda *flags: load_settings([], [*needed, *flags], registry=registry)


@pytest.mark.parametrize(
    ("flags", "loss", "transform"),
    [
        ([], "policy_loss", "group-norm"),
        (["--advantage-estimator", "gspo"], "gspo_loss", "group-norm"),
        (["--advantage-estimator", "cispo"], "cispo_loss", "group-norm"),
        (["--advantage-estimator", "gspo", "--loss-type", "policy_loss"], "policy_loss", "group-norm"),
        (["--advantage-estimator", "rloo"], "policy_loss", "leave-one-out"),
        (["--disable-rewards-normalization"], "policy_loss", "raw"),
    ],
)
def test_an_estimator_brings_its_loss_and_its_reward_transform(settings, registry, flags, loss, transform):
    chosen = algorithm(settings(*flags), registry)
    assert (chosen.loss.__name__, chosen.reward_transform) == (loss, transform)


def test_flags_reach_the_estimator_and_the_loss(settings, registry):
    chosen = algorithm(
        settings("--use-tis", "--tis-clip", "3", "--use-kl-loss", "--eps-clip-high", "0.28"), registry
    )
    assert chosen.estimator.keywords["tis_clip"] == 3.0
    assert chosen.loss.keywords["eps_clip_high"] == 0.28
    assert chosen.needs == {"old_log_probs", "rollout_log_probs", "ref_log_probs"}


def test_importance_weights_are_refused_beside_a_loss_that_leaves_them_out(settings, registry):
    with pytest.raises(PluginError, match=r"slime.losses: 'sft_loss' does not apply the importance weights"):
        algorithm(settings("--use-tis", "--loss-type", "sft_loss"), registry)
    assert algorithm(settings("--use-rs", "--loss-type", "sft_loss"), registry).loss.__name__ == "sft_loss"


def test_an_estimator_names_the_parts_of_rewards_that_batches_carry(settings, registry):
    flags = ["--advantage-estimator", "gdpo", "--gdpo-weights", '{"acc": 1.0, "brief": 0.5}']
    chosen = algorithm(settings(*flags), registry)
    assert (chosen.reward_parts, chosen.needs) == (("acc", "brief"), {"reward_parts"})
    assert algorithm(settings(), registry).reward_parts == ()


@pytest.mark.parametrize(
    ("name", "conventions"), [("slime", SLIME), ("verl", VERL), ("trl", TRL), ("openrlhf", OPENRLHF)]
)
def test_conventions_fill_what_nothing_else_gives(settings, name, conventions):
    found = settings("--numerics", name)
    for table, fields in conventions.items():
        values = found.sections[table].model_dump()
        assert {field: values[field] for field in fields} == fields
        assert found.origin(table, next(iter(fields))) == f"numerics {name}"


def test_the_reference_systems_conventions_are_the_defaults(settings):
    fields = {
        name: section.model_dump() for name, section in settings("--numerics", "slime").sections.items()
    }
    assert fields["algorithm"].pop("numerics") == "slime"
    defaults = {name: section.model_dump() for name, section in settings().sections.items()}
    assert defaults["algorithm"].pop("numerics") is None
    assert fields == defaults


def test_a_flag_overrides_a_convention(settings):
    found = settings("--numerics", "verl", "--eps-clip-c", "none", "--loss-reducer", "sample-mean")
    assert found.sections["algos"].eps_clip_c is None
    assert found.sections["algorithm"].loss_reducer == "sample-mean"
    assert found.sections["algos"].kl_loss_type == "low_var_kl"


def test_unknown_conventions_are_refused_with_the_nearest_name(settings):
    with pytest.raises(ConfigError, match=r"--numerics.*'verk'.*verl"):
        settings("--numerics", "verk")


def test_raw_rewards_and_a_transform_are_refused(settings, registry):
    found = settings("--disable-rewards-normalization", "--custom-reward-post-process-path", "gpg")
    assert any("disable_rewards_normalization" in p.where for p in check_settings(found, registry))
