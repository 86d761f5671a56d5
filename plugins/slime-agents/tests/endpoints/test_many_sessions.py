"""500 sessions at once with an engine that takes no time: none is mixed with another, and memory stays flat."""

from __future__ import annotations

import asyncio

from slime_agents.endpoints.bench import measure


def test_500_sessions_at_once_are_answered_each_its_own_and_leave_nothing_behind():
    found = asyncio.run(measure(500, 2, rounds=3))
    assert found["own"] == 1.0
    assert found["exact"] == 1.0
    assert found["memory_growth_mb"] < 20
