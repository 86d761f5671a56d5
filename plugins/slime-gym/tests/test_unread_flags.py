"""Flags of problems where prompts come from files."""

from __future__ import annotations

import pytest
from slime_core.checks.unread_flags import unread_flags
from slime_core.plugins.registry import Registry
from slime_core.testing.contracts.runs import tabular_settings


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        (("--gym-size", "3"), ["gym.size"]),
        (("--gym-size", "3", "--data-source-path", "gym"), []),
        (("--gym-eval-size", "3", "--eval-data-source-path", "gym"), []),
        (("--gym-partial",), []),  # which is the reward's, and rows may choose that
    ],
)
def test_flags_of_problems_are_refused_where_all_prompts_come_from_files(flags, unread):
    registry = Registry()
    with tabular_settings(registry, *flags) as settings:
        assert [problem.where for problem in unread_flags([settings], registry)] == unread
