"""Whether a setting means a certain plugin, however it names it."""

from __future__ import annotations

import pytest
from slime_core.plugins.own_name import means


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("sync", True),
        ("slime-core/sync", True),
        ("other/sync", False),
        ("one-step-off", False),
        ("core/sync", False),
        ("slime_core.loops.sync:sync", False),
        ("", False),
        (None, False),
    ],
)
def test_a_name_means_the_plugin_with_its_distribution_and_without(reference, expected):
    assert means(reference, "slime-core/sync") is expected


def test_one_of_several_is_enough():
    assert means("sft", "slime-core/default", "slime-core/sft")
    assert not means("recorded", "slime-core/default", "slime-core/sft")
