"""Closing parts: with `async` or without, and all of them, whatever one does."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.runtime.closing import close_all, close_part


class Waits:
    def __init__(self, told):
        self._told = told

    async def close(self):
        await asyncio.sleep(0)
        self._told.append("waits")


class Plain(Waits):
    def close(self):
        self._told.append("plain")


class Fails(Waits):
    def close(self):
        raise ValueError("does not close")


@pytest.mark.parametrize(("kind", "wanted"), [(Waits, ["waits"]), (Plain, ["plain"])])
def test_a_part_is_closed_by_a_method_with_async_or_without(kind, wanted):
    told = []
    asyncio.run(close_part(kind(told)))
    assert told == wanted


def test_what_has_nothing_to_close_is_left_alone():
    asyncio.run(close_part(len))
    asyncio.run(close_part(None))


def test_all_are_closed_the_first_first_and_an_error_is_logged(caplog):
    told = []
    asyncio.run(close_all([Plain(told), Fails(told), Waits(told)]))
    assert told == ["plain", "waits"]
    assert "Fails was not closed: does not close" in caplog.text
