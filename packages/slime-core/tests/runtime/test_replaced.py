"""`replaced` is `dataclasses.replace`."""

from __future__ import annotations

import dataclasses

import pytest
from slime_core.protocols import SamplingParams
from slime_core.runtime.replaced import replaced


def test_a_value_with_changes_is_that_of_dataclasses_and_the_first_stays():
    params = SamplingParams(max_new_tokens=3, stop=("a",))
    other = replaced(params, seed=7, max_new_tokens=2)
    assert other == dataclasses.replace(params, seed=7, max_new_tokens=2)
    assert params == SamplingParams(max_new_tokens=3, stop=("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        other.seed = 1  # type: ignore[misc]  # it is frozen


def test_an_unknown_field_is_refused():
    with pytest.raises(AssertionError):
        replaced(SamplingParams(max_new_tokens=3), sed=7)
