"""Options of plugin functions, one by one and as one settings object."""

from __future__ import annotations

import pytest
from slime_core.config.base import Count, SectionModel
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.bind import bind, choose_options, options_of


class GreetSettings(SectionModel):
    """Options of `greet`."""

    who: str
    """Whom."""
    times: Count = 1
    """How often."""


def greet(prefix, *, settings: GreetSettings):
    """Greet."""
    return prefix + settings.who * settings.times


def test_fields_of_a_settings_object_are_the_options():
    assert list(options_of(greet)) == ["who", "times"]
    options = choose_options(
        greet, where="args", explicit={"times": 2}, section={"who": "you", "other": "not an option"}
    )
    assert options == {"who": "you", "times": 2}
    assert bind(greet, options)("hi ") == "hi youyou"


def test_an_option_without_a_value_is_refused():
    with pytest.raises(PluginError, match="args: greet needs the option 'who'"):
        choose_options(greet, where="args", explicit={})


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(PluginError, match="found the key 'time'; did you mean 'times'"):
        choose_options(greet, where="args", explicit={"time": 2})


def test_every_value_that_does_not_fit_is_named():
    with pytest.raises(ConfigError) as caught:
        choose_options(greet, where="args", explicit={"who": 3, "times": 0})
    assert [(p.where, p.found, p.wanted) for p in caught.value.problems] == [
        ("args.who", "3", "a valid string"),
        ("args.times", "0", "greater than or equal to 1"),
    ]


def test_a_function_whose_settings_all_have_defaults_is_bound_without_options():
    def count(value, *, settings: TallySettings):
        return value + settings.by

    assert bind(count, {})(3) == 4


class TallySettings(SectionModel):
    """Options of `count`."""

    by: int = 1
    """How much."""
