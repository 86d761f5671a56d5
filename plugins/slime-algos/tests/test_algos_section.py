"""The section `algos` and its check."""

from types import SimpleNamespace

import importlib_metadata
import pytest
from pydantic import ValidationError
from slime_algos.hooks import slime_check_config, slime_config_sections
from slime_algos.section import AlgosSection
from slime_core.plugins.bind import options_of

GROUPS = ("slime.advantages", "slime.losses", "slime.reducers")


def check(**values):
    section = AlgosSection(**values)
    return list(slime_check_config(SimpleNamespace(section=lambda _: section)))


def test_flags_have_no_prefix():
    (section,) = slime_config_sections()
    assert (section.name, section.model, section.prefix) == ("algos", AlgosSection, "")


@pytest.mark.parametrize(
    "values",
    [
        {"eps_clip": 1.0},
        {"eps_clip": -0.1},
        {"eps_clip_c": 1.0},
        {"kl_loss_coef": -1.0},
        {"kl_loss_type": "k4"},
    ],
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValidationError):
        AlgosSection(**values)


def test_kl_weight_without_kl_is_a_problem():
    (problem,) = check(kl_loss_coef=0.1)
    assert problem.where == "algos.kl_loss_coef"
    assert problem.todo == "add --use-kl-loss"


@pytest.mark.parametrize("values", [{}, {"use_kl_loss": True}, {"use_kl_loss": True, "kl_loss_coef": 0.1}])
def test_kl_settings_that_agree_are_no_problem(values):
    assert check(**values) == []


def test_options_have_one_default_and_each_setting_is_an_option():
    points = importlib_metadata.entry_points()
    functions = [p.load() for p in points if p.dist.name == "slime-algos" and p.group in GROUPS]
    options = {}
    for function in functions:
        for name, parameter in options_of(function).items():
            assert options.setdefault(name, parameter.default) == parameter.default, (function, name)
    settings = AlgosSection().model_dump()
    assert settings == {name: options[name] for name in settings}
