"""Flags of problems and of turns that nothing chosen reads."""

from __future__ import annotations

import pytest
from slime_core.checks.unread_flags import unread_flags
from slime_core.plugins.registry import Registry
from slime_core.testing.contracts.runs import tabular_settings

FILE, GENERATED = (("--data-source-path", name) for name in ("kernelbench", "kernel-problems"))
TURNS = ("--custom-generate-function-path", "kernel-turns")


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        (("--kernels-size", "3"), ["kernels.size"]),
        (("--kernels-levels", "1"), ["kernels.levels"]),
        ((*GENERATED, "--kernels-size", "3", "--kernels-levels", "1"), []),
        ((*FILE, "--kernels-size", "3", "--kernels-levels", "1"), ["kernels.size"]),
        ((*GENERATED, "--kernels-problems", "a.jsonl"), ["kernels.problems"]),
        ((*FILE, "--eval-data-source-path", "slime-kernels/kernel-problems", "--kernels-size", "3"), []),
        (("--kernels-concurrency", "4"), []),  # which is the reward's, and rows may choose that
        ((*GENERATED, "--kernel-max-turns", "2"), ["kernel_turns.kernel_max_turns"]),
        ((*TURNS, "--kernel-max-turns", "2"), []),
    ],
)
def test_flags_are_refused_that_the_chosen_source_and_generator_do_not_read(flags, unread):
    registry = Registry()
    with tabular_settings(registry, *flags) as settings:
        found = [p.where for p in unread_flags([settings], registry) if p.where.startswith("kernel")]
    assert found == unread
