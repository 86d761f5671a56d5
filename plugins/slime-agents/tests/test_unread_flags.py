"""Flags of generators that are not chosen."""

from __future__ import annotations

import pytest
from slime_agents.hooks import _READ
from slime_agents.section import AgentsSection
from slime_core.checks.unread_flags import unread_flags
from slime_core.plugins.registry import Registry
from slime_core.testing.contracts.runs import tabular_settings

LOOP, AGENT, ROLES = (("--custom-generate-function-path", name) for name in ("tool-loop", "agent", "roles"))


def test_each_setting_is_read_by_a_generator():
    assert {field for fields in _READ.values() for field in fields} == set(AgentsSection.model_fields)


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        (("--agents-max-turns", "3"), ["agents.max_turns"]),
        # Which is of the package, and reads none of them.
        (("--agents-max-turns", "3", "--environment", "search"), ["agents.max_turns"]),
        ((*LOOP, "--agents-max-turns", "3", "--agents-max-tool-chars", "9"), []),
        ((*AGENT, "--agents-max-turns", "3", "--agents-max-tool-chars", "9"), ["agents.max_tool_chars"]),
        ((*ROLES, "--agents-max-turns", "3", "--agents-system-prompt", "be brief"), ["agents.max_turns"]),
        ((*AGENT, "--agents-system-prompt", "be brief"), ["agents.system_prompt"]),
        ((*LOOP, "--agents-program", "x", "--agents-tool-format", "json"), ["agents.program"]),
        ((*AGENT, "--agents-max-tool-chars", "8000"), []),  # as without the flag
        (("--custom-generate-function-path", "somebody:wraps", "--agents-max-turns", "3"), []),
    ],
)
def test_flags_are_refused_that_the_chosen_generator_does_not_read(flags, unread, tmp_path, monkeypatch):
    (tmp_path / "somebody.py").write_text("async def wraps(ctx, sample, params):\n    return sample\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry()
    with tabular_settings(registry, *flags) as settings:
        found = [p for p in unread_flags([settings], registry) if p.where.startswith("agents.")]
    assert [problem.where for problem in found] == unread


def test_the_generator_of_an_evaluation_set_reads_its_own(tmp_path):
    sets = tmp_path / "sets.json"
    sets.write_text(
        '{"eval": {"datasets": [{"name": "a", "path": "a.jsonl", "custom_generate_function_path": "tool-loop"}]}}'
    )
    flags = ("--agents-max-tool-chars", "9", "--agents-max-requests-at-once", "2", "--eval-config", str(sets))
    registry = Registry()
    with tabular_settings(registry, *flags) as settings:
        found = [str(p) for p in unread_flags([settings], registry) if p.where.startswith("agents.")]
    (problem,) = found
    assert problem.startswith(
        "agents.max_requests_at_once: found --agents-max-requests-at-once, which nothing"
    )
    assert problem.endswith("wanted --custom-generate-function-path agent, or not this flag")
